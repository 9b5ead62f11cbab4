"""Batches on their way to a CUDA device, some ahead of the training, on a stream of their own.

Order: for each batch, our stream gets its copy, an event, the transform, and another event. Whoever takes the batch
lets its own stream wait for the second event. The CPU waits for nothing.

Ownership: the batch in host memory, and with it its slot, is held until the first event has passed, also if nobody
wants the batch on the device any more. What is on the device belongs to our stream, whose next batch gets the memory as
soon as Python is done with it; so the allocator is told of the stream that uses it.

What cannot be followed that far goes the way that it goes under Lightning: it is copied and transformed when it is
asked for, on the stream of whoever asks. That is a batch with an object that moves itself by its method ``to``, whose
tensors nobody can list, with a sparse, nested or wrapped tensor, or with one that is on a device already.
"""

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, cuda, nn

from lightning_hpc.data.placed_operators import PlacedOperators

_Held = deque[tuple[Any, Any]]  # events, and the batches that are copied until then


@dataclass
class _OnItsWay:
    batch: Any
    ready: Any  # the event behind its copy and transform; None if it is still in host memory


class DevicePrefetcher:
    """Copies the batches of one loader to a CUDA device.

    Nothing touches CUDA before the first batch is asked for: workers start before.

    Args:
        device: Where to; without an index, the device that is current then.
        transform: Called with each batch on the device, on the stream of the copies; a Module is moved there once. What
            it returns holds its tensors in lists, tuples, mappings and dataclasses.
        depth: Batches on their way behind the one that was handed out.
    """

    def __init__(self, device: torch.device, transform: Callable[[Any], Any] | None, depth: int) -> None:
        self.device, self._transform, self._depth = device, transform, depth
        self._held: _Held = deque()
        weakref.finalize(self, _wait_for, os.getpid(), self._held).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.device, self._transform, self._depth)

    def begin(self, next_batch: Callable[[], Any]) -> Callable[[], Any]:
        """Begins an epoch.

        Args:
            next_batch: Gives the next batch in host memory, or raises.

        Returns:
            What gives the next batch on the device. It raises what `next_batch` and the transform have raised, when the
            batches before that were handed out; and TypeError if the transform has put tensors where nobody finds them.
        """
        if not cuda.is_available():
            raise RuntimeError(f"device={str(self.device)!r}, but CUDA is not available here; leave it out")
        return _Epoch(self, next_batch, self._depth).next

    def send(self, batch: Any) -> _OnItsWay:
        """Begins to copy and to transform a batch."""
        while self._held and self._held[0][0].query():
            self._held.popleft()
        if not all(_is_plain(leaf) for leaf in _leaves(batch)):
            return _OnItsWay(batch, None)
        with cuda.stream(self._stream):
            moved = self._copy(batch)
            if self._transform is not None:
                moved = self._transform(moved)
                _require_found(moved)
            return _OnItsWay(moved, self._stream.record_event())

    def hand_out(self, sent: _OnItsWay) -> Any:
        """The batch on the device, for the current stream."""
        user = cuda.current_stream(self._device)
        if sent.ready is None:
            user.wait_stream(self._stream)  # where the transform was moved to the device
            moved = self._copy(sent.batch)
            return moved if self._transform is None else self._transform(moved)
        user.wait_event(sent.ready)
        for leaf in _leaves(sent.batch):
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                leaf.record_stream(user)
        return sent.batch

    def close(self) -> None:
        """Waits until no batch in host memory is read any more."""
        _wait_for(os.getpid(), self._held)

    @cached_property
    def _device(self) -> torch.device:
        return torch.device("cuda", cuda.current_device()) if self.device.index is None else self.device

    @cached_property
    def _stream(self) -> Any:
        stream = cuda.Stream(self._device)
        # What the transform uses may just be on its way there.
        stream.wait_stream(cuda.current_stream(self._device))
        if isinstance(self._transform, (nn.Module, PlacedOperators)):
            with cuda.stream(stream):
                self._transform.to(self._device)
        return stream

    def _copy(self, batch: Any) -> Any:
        """Copies a batch on the current stream, and holds it as long as that takes."""
        try:
            return move_data_to_device(batch, self._device)
        finally:
            self._held.append((cuda.current_stream(self._device).record_event(), batch))


class _Epoch:
    def __init__(self, prefetcher: DevicePrefetcher, next_batch: Callable[[], Any], depth: int) -> None:
        self._prefetcher, self._next_batch, self._depth = prefetcher, next_batch, depth
        self._under_way: deque[_OnItsWay | Exception] = deque()

    def next(self) -> Any:
        # Nothing is asked for behind an error before somebody has seen it.
        while len(self._under_way) <= self._depth and not (
            self._under_way and isinstance(self._under_way[-1], Exception)
        ):
            try:
                self._under_way.append(self._prefetcher.send(self._next_batch()))
            except Exception as error:
                self._under_way.append(error)
        first = self._under_way.popleft()
        if not isinstance(first, Exception):
            return self._prefetcher.hand_out(first)
        try:
            raise first
        finally:
            del first  # its traceback refers to this frame, and would keep the loader alive


def _wait_for(owner: int, held: _Held) -> None:
    """Waits for events; a fork has copied them, but not the device."""
    while held and os.getpid() == owner:
        with contextlib.suppress(RuntimeError):  # a device that has failed copies nothing any more
            held[0][0].synchronize()
        held.popleft()


def _leaves(value: Any) -> Iterator[Any]:
    """All that `move_data_to_device` finds in a batch."""
    if callable(getattr(type(value), "to", None)) or isinstance(value, (str, bytes)):
        yield value
    elif isinstance(value, (Mapping, Sequence)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name))
    else:
        yield value


def _is_plain(leaf: Any) -> bool:
    """Whether nothing of it is moved, or it is a tensor in host memory with memory of its own."""
    if not isinstance(leaf, Tensor):
        return not callable(getattr(type(leaf), "to", None))
    return leaf.device.type == "cpu" and _has_one_memory(leaf)


def _has_one_memory(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    # A subclass that wraps other tensors cannot be taken off.
    return type(tensor) is Tensor or type(tensor.as_subclass(Tensor)) is Tensor


def _require_found(batch: Any) -> None:
    """Raises where tensors on the device could lose their memory while they are used."""
    for leaf in _leaves(batch):
        if isinstance(leaf, Tensor):
            is_found = not leaf.is_cuda or _has_one_memory(leaf)
        else:
            has_tensors = any(isinstance(value, Tensor) for value in getattr(leaf, "__dict__", {}).values())
            is_found = not has_tensors and not callable(getattr(type(leaf), "to", None))
        if not is_found:
            raise TypeError(
                f"device_transform returned a batch with a {type(leaf).__name__}, whose memory nobody can follow from"
                " stream to stream; return dense tensors in lists, tuples, dicts or dataclasses, or transform the batch"
                " in the training step"
            )


def prefetcher_for(
    device: str | torch.device | None, transform: Callable[[Any], Any] | None, depth: int
) -> DevicePrefetcher | None:
    """What takes batches to a device, as `SharedMemoryLoader` is told; None where they stay in host memory.

    Raises:
        ValueError: If the device is neither one of CUDA nor the CPU, or if no batch is to be on its way.
    """
    if depth < 1:
        raise ValueError(f"device_prefetch={depth!r} must be at least 1: batches on their way to the device")
    found = torch.device("cpu" if device is None else device)
    if found.type not in ("cpu", "cuda"):
        raise ValueError(
            f"device={device!r} is neither a CUDA device nor the CPU; leave it out, and move batches yourself"
        )
    return DevicePrefetcher(found, transform, depth) if found.type == "cuda" else None
