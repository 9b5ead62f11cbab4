"""A CUDA device that does everything late, and in any order that CUDA allows: what no event orders goes wrong."""

import contextlib
import ctypes
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.types import _DEVICE
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_hpc.data import device_prefetch, page_lock


class OnDevice(Tensor):
    """A tensor in the memory of the device."""

    is_cuda = True


class FakeEvent:
    def __init__(self, gpu: "FakeCuda") -> None:
        self.gpu, self.has_passed = gpu, False

    def query(self) -> bool:
        self.gpu.run_some()
        return self.has_passed

    def synchronize(self) -> None:
        self.gpu.log.append(("synchronize",))
        while not self.has_passed:
            assert self.gpu.run_one(), "an event that can never pass"


class FakeStream:
    def __init__(self, gpu: "FakeCuda", name: str) -> None:
        self.gpu, self.name = gpu, name
        self.queue: deque[Callable[[], None] | FakeEvent] = deque()  # what to do, and what to wait for
        self.free: list[tuple[Block, list[FakeEvent]]] = []

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self.gpu)
        self.queue.append(lambda: setattr(event, "has_passed", True))
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.queue.append(event)

    def wait_stream(self, stream: "FakeStream") -> None:
        self.wait_event(stream.record_event())


class Block:
    """Memory of the device. It belongs to a stream, and to a tensor as long as `view` or a part of it lives."""

    def __init__(self, stream: FakeStream, numel: int) -> None:
        self.stream, self.memory = stream, torch.zeros(numel, dtype=torch.uint8)
        self.users: set[FakeStream] = set()

    def lend(self, gpu: "FakeCuda") -> memoryview:
        view = memoryview(self.memory.numpy())
        weakref.finalize(view, gpu.end, self).atexit = False
        return view


class FakeCuda:
    """In place of `torch.cuda`, and of what copies.

    Args:
        seed: Decides what the device does when.
        is_late: Whether it does things later than it is told.
    """

    def __init__(self, seed: int = 0, is_late: bool = True) -> None:
        self.rng, self.is_late = random.Random(seed), is_late
        self.log: list[tuple[Any, ...]] = []
        self.streams: list[FakeStream] = []
        self.blocks: dict[int, Block] = {}
        self.main = self.current = self._make("main")
        self.refusal = 0  # what the next registrations give
        self.registered: dict[int, int] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "FakeCuda":
        for module in (device_prefetch, page_lock):
            monkeypatch.setattr(module, "cuda", self)
        monkeypatch.setattr(device_prefetch, "move_data_to_device", self.move)
        monkeypatch.setattr(page_lock, "_forget_error", lambda device: self.log.append(("forget",)))
        monkeypatch.setattr(OnDevice, "record_stream", lambda *args: self.record_stream(*args))
        return self

    # What `torch.cuda` has.

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802
        return self._make(f"copies{len(self.streams)}")

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    def current_device(self) -> int:
        return 0

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return False

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        previous, self.current = self.current, stream
        yield
        self.current = previous

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    def cudart(self) -> Any:
        return self

    def cudaHostRegister(self, address: int, numel: int, flags: int) -> int:  # noqa: N802
        if not self.refusal:
            assert not any(begin < address + numel and address < end for begin, end in self.registered.items())
            self.registered[address] = address + numel
        self.log.append(("register", address, numel, flags))
        return self.refusal

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.log.append(("unregister", address))
        return 0 if self.registered.pop(address, None) else 1

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return "operation not permitted"

    # What happens on the device.

    def enqueue(self, work: Callable[[], None]) -> None:
        """Puts something behind what the current stream has to do."""
        self.current.queue.append(work)
        if not self.is_late:
            self.run_all()

    def move(self, batch: Any, device: _DEVICE) -> Any:
        """As the original; a copy reads the memory that the tensor had, whoever has that by then."""
        assert torch.device(device) == torch.device("cuda", 0)
        moved = apply_to_collection(batch, Tensor, lambda each: each if each.is_cuda else self._copy(each))
        return move_data_to_device(moved, "cpu")

    def apply(self, function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
        """A kernel: gives a new tensor of the same shape and dtype."""
        target = self.empty(tensor)
        self._write(target, self.raw(tensor), function)
        return target

    def read(self, tensor: Tensor) -> Tensor:
        """A kernel that reads a tensor; its values are in what is returned when everything has run."""
        found = torch.full(tensor.shape, -2, dtype=tensor.dtype)
        self._write(found, self.raw(tensor))
        return found

    def run_all(self) -> None:
        while self.run_one():
            pass

    def run_some(self) -> None:
        for _ in range(self.rng.randrange(8)):
            self.run_one()

    def run_one(self) -> bool:
        ready = [each for each in self.streams if each.queue and getattr(each.queue[0], "has_passed", True)]
        if not ready:
            return False
        first = self.rng.choice(ready).queue.popleft()
        if not isinstance(first, FakeEvent):
            first()
        return True

    # Memory of the device.

    def empty(self, like: Tensor) -> Tensor:
        numel = max(like.numel() * like.itemsize, 1)
        block = self._take(numel)
        self.blocks[block.memory.data_ptr()] = block
        flat = (
            torch.frombuffer(block.lend(self), dtype=like.dtype, count=like.numel()) if like.numel() else like.flatten()
        )
        return flat.view(like.shape).as_subclass(OnDevice)

    def raw(self, tensor: Tensor) -> Tensor:
        """The same memory, which does not keep it from being used again."""
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        storage = tensor.untyped_storage()
        place = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
        flat = torch.frombuffer(place, dtype=tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def record_stream(self, tensor: Tensor, stream: FakeStream) -> None:
        self.log.append(("record_stream", stream.name))
        if tensor.numel():
            self.blocks[tensor.untyped_storage().data_ptr()].users.add(stream)

    def end(self, block: Block) -> None:
        """As the caching allocator: memory goes back to its stream, when the others that use it are so far."""
        waits = [stream.record_event() for stream in block.users if stream is not block.stream]
        block.users = set()
        block.stream.free.append((block, waits))

    def _make(self, name: str) -> FakeStream:
        self.streams.append(FakeStream(self, name))
        return self.streams[-1]

    def _copy(self, tensor: Tensor) -> Tensor:
        self.log.append(("copy", self.current.name))
        target = self.empty(tensor)
        self._write(target, self.raw(tensor.contiguous()))
        return target

    def _write(self, target: Tensor, source: Tensor, function: Callable[[Tensor], Tensor] = Tensor.clone) -> None:
        into = self.raw(target) if isinstance(target, OnDevice) else target

        def work() -> None:
            into.copy_(function(source))

        self.enqueue(work)

    def _take(self, numel: int) -> Block:
        free = self.current.free
        for index, (block, waits) in enumerate(free):
            if block.memory.numel() == numel and all(event.has_passed for event in waits):
                free.pop(index)
                return block
        return Block(self.current, numel)
