"""What order the prefetcher gives to a device that does everything as late as it may, and in any order that it may."""

import copy
import pickle
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hpc.data.device_prefetch import DevicePrefetcher, prefetcher_for
from tests.data.fake_cuda import FakeCuda, OnDevice

CUDA = torch.device("cuda")


class Slots:
    """Batches in memory that is used again, and overwritten, as soon as a batch is gone."""

    def __init__(self, count: int = 64, rows: int = 4) -> None:
        self.memory, self.rows = torch.zeros(count, rows, dtype=torch.int64), rows
        self.free = list(range(count))
        self.made = 0

    def next(self) -> Tensor:
        slot = self.free.pop()
        self.memory[slot] = self.made
        self.made += 1
        view = memoryview(self.memory[slot].numpy()).cast("B")
        weakref.finalize(view, self.end, slot).atexit = False
        return torch.frombuffer(view, dtype=torch.int64)

    def end(self, slot: int) -> None:
        self.memory[slot] = -1
        self.free.append(slot)


def steps(gpu: FakeCuda, next_batch: Callable[[], Any], count: int) -> list[Any]:
    """Trains: the batch is read on the main stream, and forgotten. Returns what was read."""
    found = []
    for _ in range(count):
        batch = next_batch()
        assert isinstance(batch, OnDevice)
        found.append(gpu.read(batch))
        del batch
        gpu.run_some()
    gpu.run_all()
    return [each.tolist() for each in found]


def plus_one(gpu: FakeCuda) -> Callable[[Any], Any]:
    """In two kernels, with a constant that the main stream has yet to write."""
    constant: Any = gpu.empty(torch.zeros(4, dtype=torch.int64))
    for _ in range(10):
        constant = gpu.apply(Tensor.clone, constant)
    one = gpu.raw(constant := gpu.apply(torch.ones_like, constant))

    def transform(batch: Any) -> Any:
        assert isinstance(constant, OnDevice)
        return gpu.apply(lambda values: values + one, gpu.apply(Tensor.clone, batch))

    return transform


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("is_transformed", [False, True])
def test_every_batch_arrives_whatever_the_device_does_when(
    depth: int, is_transformed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(15):
        gpu, slots = FakeCuda(seed).install(monkeypatch), Slots()
        prefetcher = DevicePrefetcher(CUDA, plus_one(gpu) if is_transformed else None, depth)
        found = steps(gpu, prefetcher.begin(slots.next), 30)
        assert found == [[number + is_transformed] * 4 for number in range(30)]
        assert ("synchronize",) not in gpu.log


def test_the_fake_device_goes_wrong_where_nothing_waits() -> None:
    found, source = [], torch.arange(1, 5)
    for seed in range(20):
        gpu = FakeCuda(seed)
        with gpu.stream(gpu.Stream(CUDA)):
            batch = gpu.move(source, torch.device("cuda", 0))
        found.append(gpu.read(batch))
        gpu.run_all()
    assert {tuple(each.tolist()) for each in found} == {(1, 2, 3, 4), (0, 0, 0, 0)}


def test_as_many_batches_are_on_their_way_as_it_is_deep_and_none_before_the_first_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for depth in (1, 3):
        gpu, slots = FakeCuda().install(monkeypatch), Slots()
        next_batch = DevicePrefetcher(CUDA, None, depth).begin(slots.next)
        assert (slots.made, len(gpu.streams)) == (0, 1)
        for handed_out in range(1, 5):
            next_batch()
            assert slots.made == handed_out + depth
        assert [entry[1] for entry in gpu.log if entry[0] == "copy"] == ["copies1"] * (4 + depth)


def test_a_slot_is_held_until_its_copy_is_made_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, slots = FakeCuda().install(monkeypatch), Slots(count=4)
    prefetcher = DevicePrefetcher(CUDA, lambda batch: batch if batch is None else gpu.apply(Tensor.clone, batch), 1)
    next_batch = prefetcher.begin(slots.next)
    monkeypatch.setattr(gpu, "run_some", lambda: None)
    next_batch()
    assert len(slots.free) == 2
    gpu.main.queue.popleft()()  # type: ignore[operator]
    for _ in ("wait for the main stream", "copy", "event"):
        prefetcher.send(None)
        assert len(slots.free) == 2
        gpu.run_one()
    prefetcher.send(None)
    assert len(slots.free) == 3  # and the transform has not run


def test_a_slot_is_held_until_its_copy_is_made_also_where_nobody_wants_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, slots = FakeCuda().install(monkeypatch), Slots(count=4)
    monkeypatch.setattr(gpu, "run_some", lambda: None)
    prefetcher = DevicePrefetcher(CUDA, None, 2)
    next_batch: Any = prefetcher.begin(slots.next)
    next_batch()
    del next_batch
    assert len(slots.free) == 1
    prefetcher.close()
    assert len(slots.free) == 4
    next_batch = prefetcher.begin(slots.next)
    next_batch()
    gpu.log.clear()
    del next_batch, prefetcher
    assert len(slots.free) == 4
    assert ("synchronize",) in gpu.log


def test_one_stream_serves_all_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, slots = FakeCuda().install(monkeypatch), Slots()
    prefetcher = DevicePrefetcher(CUDA, None, 1)
    for _ in range(3):
        prefetcher.begin(slots.next)()
    assert len(gpu.streams) == 2


def failing(*outcomes: Any) -> Callable[[], Any]:
    left = iter(outcomes)

    def next_batch() -> Any:
        outcome = next(left)
        if isinstance(outcome, Exception):
            raise outcome
        return torch.full((2,), outcome)

    return next_batch


def outcomes_of(next_batch: Callable[[], Any]) -> Iterator[Any]:
    for _ in range(7):
        try:
            yield int(next_batch()[0])
        except Exception as error:
            yield type(error)


def test_errors_come_in_their_turn_and_what_is_behind_them_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(is_late=False).install(monkeypatch)
    for depth in (1, 2, 9):
        next_batch = DevicePrefetcher(CUDA, None, depth).begin(failing(0, 1, KeyError("x"), 3, ValueError("y")))
        expected = [0, 1, KeyError, 3, ValueError, StopIteration, StopIteration]
        assert list(outcomes_of(next_batch)) == expected


def test_an_error_of_the_transform_belongs_to_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(is_late=False).install(monkeypatch)

    def transform(batch: Tensor) -> Tensor:
        if int(batch[0]) == 1:
            raise ArithmeticError("one")
        return batch

    next_batch = DevicePrefetcher(CUDA, transform, 2).begin(failing(0, 1, 2))
    assert list(outcomes_of(next_batch))[:4] == [0, ArithmeticError, 2, StopIteration]


def test_a_module_is_moved_to_the_device_once_on_the_stream_of_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = []

    class Adds(nn.Module):
        def to(self, device: torch.device) -> None:  # type: ignore[override]
            moves.append((gpu.current.name, device))

        def forward(self, batch: Tensor) -> Tensor:
            assert gpu.current.name == "copies1"
            return gpu.apply(lambda values: values + 1, batch)

    gpu, slots = FakeCuda().install(monkeypatch), Slots()
    prefetcher = DevicePrefetcher(CUDA, Adds(), 2)
    for _ in range(2):
        steps(gpu, prefetcher.begin(slots.next), 2)
    assert moves == [("copies1", torch.device("cuda", 0))]


@dataclass
class Pair:
    x: Tensor
    name: str


class Moves:
    """A batch that moves itself."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: Any) -> "Moves":
        self.x = self.x.clone()
        return self


def test_all_nestings_are_moved_and_the_allocator_is_told_of_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeCuda(is_late=False).install(monkeypatch)
    one = torch.ones(2)
    batch = {"a": [one, (one, 3)], "b": Pair(one, "x"), "c": UserDict(d=one), "e": None, "f": b"x", "g": one.numpy()}
    moved = DevicePrefetcher(CUDA, None, 1).begin(lambda: batch)()
    assert list(moved) == list(batch)
    for tensor in (moved["a"][0], moved["a"][1][0], moved["b"].x, moved["c"]["d"]):
        assert isinstance(tensor, OnDevice)
        assert tensor.tolist() == [1, 1]
    assert [moved["a"][1][1], moved["b"].name, moved["e"], moved["f"]] == [3, "x", None, b"x"]
    assert moved["g"] is batch["g"]
    assert gpu.log.count(("record_stream", "main")) == 4


@pytest.mark.parametrize(
    "batch",
    [{"x": Moves(torch.ones(3))}, [torch.ones(3).to_sparse()], (torch.ones(3).as_subclass(OnDevice), torch.ones(1))],
    ids=["object", "sparse", "on the device"],
)
def test_what_cannot_be_followed_is_moved_when_it_is_asked_for(batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeCuda().install(monkeypatch)
    seen: list[str] = []
    if not isinstance(batch, dict):
        monkeypatch.setattr(gpu, "_copy", lambda tensor: tensor)
    monkeypatch.setattr(OnDevice, "device", CUDA, raising=False)
    transform = lambda batch: (seen.append(gpu.current.name), batch)[1]  # noqa: E731
    next_batch = DevicePrefetcher(CUDA, transform, 2).begin(lambda: copy.copy(batch))
    next_batch()
    next_batch()
    assert seen == ["main", "main"]
    assert ("copy", "copies1") not in gpu.log


def test_a_module_is_moved_also_where_all_batches_are_moved_late(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Notes(nn.Module):
        def to(self, device: torch.device) -> None:  # type: ignore[override]
            gpu.enqueue(lambda: order.append("moved"))

        def forward(self, batch: Moves) -> Moves:
            gpu.enqueue(lambda: order.append("used"))
            return batch

    for seed in range(10):
        order.clear()
        gpu = FakeCuda(seed).install(monkeypatch)
        DevicePrefetcher(CUDA, Notes(), 1).begin(lambda: Moves(torch.ones(3)))()
        gpu.run_all()
        assert order == ["moved", "used"]


@pytest.mark.parametrize(
    "hide",
    [lambda tensor: [SimpleNamespace(x=tensor)], lambda tensor: {"x": Moves(tensor)}],
    ids=["namespace", "object"],
)
def test_a_transform_that_hides_its_tensors_is_an_error(
    hide: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda().install(monkeypatch)
    with pytest.raises(TypeError, match=r"device_transform returned a batch with a (SimpleNamespace|Moves)"):
        DevicePrefetcher(CUDA, hide, 1).begin(lambda: torch.ones(3))()


def test_an_error_keeps_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(is_late=False).install(monkeypatch)

    class Source:
        def next(self) -> Any:
            raise StopIteration

    source = Source()
    gone = weakref.ref(source)
    next_batch: Any = DevicePrefetcher(CUDA, None, 1).begin(source.next)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next_batch()
    del source, next_batch
    assert gone() is None


def test_wrong_arguments_are_named_and_the_cpu_needs_no_prefetcher() -> None:
    for device in ("cuda", "cuda:3", torch.device("cuda", 1)):
        found = prefetcher_for(device, None, 2)
        assert found is not None
        assert pickle.loads(pickle.dumps(found)).device == torch.device(device)
    assert prefetcher_for(None, None, 2) is None
    assert prefetcher_for("cpu", None, 2) is None
    with pytest.raises(ValueError, match="device='meta' is neither"):
        prefetcher_for("meta", None, 2)
    with pytest.raises(ValueError, match="device_prefetch=0 must be at least 1"):
        prefetcher_for(None, None, 0)
