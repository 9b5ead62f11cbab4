"""Randomness that depends on what is drawn for, never on who draws it."""

import ctypes
import functools
import random
import struct
import sys
import zlib
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from numpy.random import MT19937, get_bit_generator  # type: ignore[attr-defined]
from torch.utils._pytree import tree_leaves

_MASK = 2**64 - 1
_MT19937_BYTES = 624 * 4 + 4  # its words, and the position in them
_python_generator: Any = getattr(random.random, "__self__")  # noqa: B009  # mypy takes it for a function


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
        self._python = _python_state()
        self._torch = _torch_memory()
        self._numpy = _numpy_memory()
        # NumPy keeps the second of two Gaussians elsewhere; a new one only together with a change of that memory.
        is_known = last is not None and last._gaussian is None and _are_equal(last._numpy, self._numpy)
        self._gaussian: float | None = None if is_known else _numpy_gaussian()

    def have_changed(self) -> bool:
        """Whether something was drawn since then."""
        return (
            not _are_equal(self._numpy, _numpy_memory())
            or (self._gaussian is not None and self._gaussian != _numpy_gaussian())
            or self._python != _python_state()
            or self._torch != _torch_memory()
        )

    def restore(self) -> None:
        """Puts them back."""
        _restore_python(self._python)
        torch.default_generator.set_state(torch.frombuffer(bytearray(self._torch), dtype=torch.uint8))
        now: dict[str, Any] = dict(np.random.get_state(legacy=False))
        np.random.set_state({**now, "has_gauss": int(self._gaussian is not None), "gauss": self._gaussian or 0.0})
        generator = get_bit_generator()
        if isinstance(self._numpy, bytes):
            memory = _memory_of(generator)
            assert memory is not None, f"NumPy's generator has become a {type(generator).__name__} while it was used"
            memory.raw = self._numpy
        else:
            generator.state = self._numpy


def _python_state() -> tuple[Any, ...]:
    """What Python's generator holds: its memory, and the second of two Gaussians."""
    memory = _python_memory()
    return random.getstate() if memory is None else (memory.raw, _python_generator.gauss_next)


def _restore_python(state: tuple[Any, ...]) -> None:
    memory = _python_memory()
    if memory is None:
        random.setstate(state)
    else:
        memory.raw, _python_generator.gauss_next = state


@functools.cache
def _python_memory() -> "ctypes.Array[ctypes.c_char] | None":
    """Where CPython keeps the position and the words of its generator: to ask for them makes 625 integers each time.

    None where they are not found there, so that nothing depends on how this or another Python is made.
    """
    header = object.__basicsize__
    if sys.implementation.name != "cpython" or type(_python_generator).__basicsize__ < header + _MT19937_BYTES:
        return None
    address = id(_python_generator) + header
    memory = (ctypes.c_char * _MT19937_BYTES).from_address(address)
    position, *words = struct.unpack("=I624I", memory.raw)
    return memory if (*words, position) == random.getstate()[1] else None


def _torch_memory() -> bytes:
    return torch.default_generator.get_state().numpy().tobytes()  # bytes compare several times as fast as tensors


def _numpy_memory() -> bytes | dict[str, Any]:
    """The memory of NumPy's generator: to ask it for its state takes a hundred times as long."""
    generator = get_bit_generator()
    memory = _memory_of(generator)
    return dict(generator.state) if memory is None else memory.raw


@functools.lru_cache(maxsize=1)
def _memory_of(generator: Any) -> "ctypes.Array[ctypes.c_char] | None":
    """None where somebody has put another kind of generator in NumPy's place."""
    if not isinstance(generator, MT19937):
        return None
    return (ctypes.c_char * _MT19937_BYTES).from_address(generator.ctypes.state_address)


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
