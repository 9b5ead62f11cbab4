"""Randomness that depends on what is drawn for, never on who draws it."""

import ctypes
import random
import zlib
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from numpy.random import MT19937, get_bit_generator  # type: ignore[attr-defined]
from torch.utils._pytree import tree_leaves

_MASK = 2**64 - 1
_MT19937_BYTES = 624 * 4 + 4  # its words, and the position in them


def mix(*words: int) -> int:
    """A 32-bit seed from any integers; a change of one bit changes half of it (the finaliser of SplitMix64)."""
    state = 0
    for word in words:
        state = (state ^ word & _MASK) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 32


def seed_for(seed: int, key: Hashable) -> int:
    """The seed of a sample.

    Args:
        seed: Of the epoch.
        key: Index of the sample, or whatever the sampler gives instead.
    """
    return mix(seed, key if isinstance(key, int) else zlib.crc32(repr(key).encode()))


def seed_all(seed: int) -> None:
    """Seeds the generators of Python, NumPy and PyTorch on the CPU with 32 bits."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


class GeneratorStates:
    """What the three generators hold now: to notice cheaply that something was drawn, and to undo it.

    Args:
        last: The states when they were looked at before, which may save a slow look.
    """

    def __init__(self, last: "GeneratorStates | None" = None) -> None:
        self._python = random.getstate()
        self._torch = torch.default_generator.get_state()
        self._numpy = _numpy_memory()
        # NumPy keeps the second of two Gaussians elsewhere; a new one only together with a change of that memory.
        is_known = last is not None and last._gaussian is None and _are_equal(last._numpy, self._numpy)
        self._gaussian: float | None = None if is_known else _numpy_gaussian()

    def have_changed(self) -> bool:
        """Whether something was drawn since then."""
        return (
            not _are_equal(self._numpy, _numpy_memory())
            or (self._gaussian is not None and self._gaussian != _numpy_gaussian())
            or not torch.equal(self._torch, torch.default_generator.get_state())
            or self._python != random.getstate()
        )

    def restore(self) -> None:
        """Puts them back."""
        random.setstate(self._python)
        torch.default_generator.set_state(self._torch)
        now: dict[str, Any] = dict(np.random.get_state(legacy=False))
        np.random.set_state({**now, "has_gauss": int(self._gaussian is not None), "gauss": self._gaussian or 0.0})
        generator = get_bit_generator()
        if isinstance(self._numpy, bytes):
            ctypes.memmove(generator.ctypes.state_address, self._numpy, _MT19937_BYTES)
        else:
            generator.state = self._numpy


def _numpy_memory() -> bytes | dict[str, Any]:
    """The memory of NumPy's generator: to ask it for its state takes a hundred times as long."""
    generator = get_bit_generator()
    if isinstance(generator, MT19937):
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return dict(generator.state)  # somebody has put another one in its place


def _are_equal(one: bytes | dict[str, Any], other: bytes | dict[str, Any]) -> bool:
    if isinstance(one, bytes):
        return one == other
    return all(map(np.array_equal, tree_leaves(one), tree_leaves(other)))  # of another generator, with arrays in it


def _numpy_gaussian() -> float | None:
    state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    return float(state["gauss"]) if state["has_gauss"] else None


class KeptGenerators:
    """Gives the three generators back the state that they had, so that nobody notices what was drawn between."""

    def __enter__(self) -> None:
        self._states = GeneratorStates()

    def __exit__(self, *_: Any) -> None:
        self._states.restore()
