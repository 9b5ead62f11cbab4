"""What one call of a checkpointed block saves, with and without checkpointing, and how long it takes."""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_hpc.memory.saved_activations import Holding, SavedActivations
from lightning_hpc.memory.saved_tensor import outer_hooks

_Pack = Callable[[Tensor], object]


class CallRecord:
    """Notes a call's inputs and what its forward and its recomputation save, and takes the time of both.

    Args:
        recorder: Where holdings are noted.
        block: Name of the block.
        device: Where it computes. Elsewhere than on the CPU, times are taken by events in its current stream.
    """

    def __init__(self, recorder: SavedActivations, block: str, device: torch.device) -> None:
        self.block = block
        self._recorder = recorder
        self._device = device
        self._marks: list[tuple[Any, Any]] = []

    @property
    def is_recomputed(self) -> bool:
        """Whether backward has come through the block."""
        return len(self._marks) > 1

    def seconds(self) -> float:
        """The shortest time that the call or its recomputation took; waits for the device."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return min((_seconds(*marks) for marks in self._marks), default=0.0)

    def hold_inputs(self, tensors: Iterable[Tensor], owner: object) -> None:
        """Notes that the block keeps ``tensors`` for its recomputation for as long as ``owner`` lives."""
        held = [holding for tensor in tensors for holding in self._recorder.hold(tensor, self.block, "checkpointed")]
        self._release_with(owner, held)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Round the call: what it saves would be held if the block were not checkpointed."""
        with _packing(self._pack_plain), self._timed():
            yield

    @contextmanager
    def recomputation(self) -> Iterator[None]:
        """Round the recomputation in backward: what it saves is held until backward has used it."""
        with _packing(self._pack_again), self._timed():
            yield

    def _pack_plain(self, tensor: Tensor, pack: _Pack) -> object:
        held = self._recorder.hold(tensor, self.block, "plain")
        placeholder = pack(tensor)  # autograd keeps it for as long as it would have kept the tensor
        self._release_with(placeholder, held)
        return placeholder

    def _pack_again(self, tensor: Tensor, pack: _Pack) -> object:
        tensor = tensor.detach()  # an object of our own, which lives as long as what is saved
        self._release_with(tensor, self._recorder.hold(tensor, self.block, "checkpointed"))
        return pack(tensor)

    def _release_with(self, owner: object, held: list[Holding]) -> None:
        weakref.finalize(owner, self._recorder.release, held).atexit = False

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = _mark(self._device)
        try:
            yield
        finally:  # a recomputation stops by an exception when nothing more is needed
            self._marks.append((start, _mark(self._device)))


@contextmanager
def _packing(outer: Callable[[Tensor, _Pack], object]) -> Iterator[None]:
    """Has ``outer`` called with all that is saved, and with the hook in force, which would be hidden otherwise."""
    pack, unpack = outer_hooks()
    with saved_tensors_hooks(lambda tensor: outer(tensor, pack), unpack):
        yield


def _mark(device: torch.device) -> Any:
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    return float(end - start) if isinstance(start, float) else float(start.elapsed_time(end)) / 1000
