"""A loader whose batches go to a device gives the same batches, counts what was handed out, and resumes exactly."""

import hashlib
import os
import pickle
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_hpc.data import epoch_iterator
from lightning_hpc.data.loader import SharedMemoryLoader
from lightning_hpc.data.sampling import ElasticSampler
from tests.data.datasets import Growing, Nested, Numbers, Parts, assert_same
from tests.data.fake_cuda import FakeCuda, OnDevice

WIDTH = 1024  # a batch of two does not fit into what is copied out of slots


def on_device(dataset: Dataset[Any], **kwargs: Any) -> SharedMemoryLoader[Any]:
    return SharedMemoryLoader(dataset, 2, device="cuda", **kwargs)


def train(gpu: FakeCuda, batches: Any) -> list[Tensor]:
    """Reads each batch on the main stream, and forgets it."""
    found = []
    for batch in batches:
        assert isinstance(batch, OnDevice)
        found.append(gpu.read(batch))
        del batch
    gpu.run_all()
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
def test_slots_are_used_again_and_no_batch_is_lost(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for depth in (1, 3):
        gpu = FakeCuda(depth).install(monkeypatch)
        loader = on_device(Numbers(60, WIDTH), num_workers=num_workers, device_prefetch=depth)
        for _ in range(2):
            found = train(gpu, loader)
            assert [batch[:, -1].tolist() for batch in found] == [[2 * i, 2 * i + 1] for i in range(30)]
        assert len(gpu.streams) == 2
        if num_workers:
            assert 2 < len(gpu.registered) <= 2 * (2 * num_workers + 4)
        loader.close()
        assert not gpu.registered


def test_batches_that_outgrow_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, sizes = FakeCuda(5).install(monkeypatch), [1, 1, 40, 1, 300, 2, 900, 1]
    loader: SharedMemoryLoader[Any] = SharedMemoryLoader(Growing(sizes), 1, num_workers=1, device="cuda")
    found = [gpu.read(batch["rows"]) for batch in loader]
    gpu.run_all()
    assert [(each.shape[1], each.unique().tolist()) for each in found] == [(size, [i]) for i, size in enumerate(sizes)]
    del loader
    assert not gpu.registered


@pytest.mark.parametrize("num_workers", [0, 1])
def test_all_nestings_come_as_from_dataloader(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(is_late=False).install(monkeypatch)
    found = list(on_device(Nested(9), num_workers=num_workers))

    def plain(value: Any) -> Any:
        return value.as_subclass(Tensor)

    moved = torch.utils._pytree.tree_map_only(OnDevice, plain, found)
    assert_same(moved, list(DataLoader(Nested(9), 2)))


def test_nothing_is_read_before_the_first_batch_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, read = FakeCuda().install(monkeypatch), []

    class Counted(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            read.append(index)
            return super().__getitem__(index)

    iterator = iter(on_device(Counted(20)))
    assert (len(read), len(gpu.streams)) == (0, 1)
    next(iterator)
    assert len(read) == 6


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_epoch_that_is_announced_after_iter_is_the_one_that_comes(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda(is_late=False).install(monkeypatch)

    def epoch(is_late: bool, device: str | None) -> list[Any]:
        sampler = ElasticSampler(range(20), 1, 0, shuffle=True, seed=3)
        loader: SharedMemoryLoader[Any] = SharedMemoryLoader(
            Numbers(20), 2, sampler=sampler, num_workers=num_workers, device=device
        )
        if not is_late:
            sampler.set_epoch(4)
        iterator = iter(loader)
        sampler.set_epoch(4)
        return [batch.tolist() for batch in iterator]

    assert epoch(True, "cuda") == epoch(False, "cuda") == epoch(False, None)


def samples(batches: Any) -> str:
    """A hash of all that is in them, in order."""
    return hashlib.sha256(repr([batch.tolist() for batch in batches]).encode()).hexdigest()


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffled": lambda: {"dataset": Numbers(31), "shuffle": True, "generator": torch.Generator().manual_seed(5)},
    "elastic": lambda: {"dataset": Numbers(31), "sampler": ElasticSampler(range(31), 1, 0, shuffle=True, seed=3)},
    "iterable": lambda: {"dataset": Parts(31)},
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_resumed_goes_on_with_what_was_not_handed_out(
    kind: str, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda(is_late=False).install(monkeypatch)

    def make(device: str | None = "cuda", depth: int = 2) -> SharedMemoryLoader[Any]:
        kwargs = KINDS[kind]()
        return SharedMemoryLoader(
            kwargs.pop("dataset"), 2, num_workers=num_workers, device=device, device_prefetch=depth, **kwargs
        )

    whole = list(make(None))
    for place, depth in ((0, 2), (1, 1), (5, 2), (9, 4), (13, 2), (15, 3)):
        loader = make(depth=depth)
        iterator = iter(loader)
        for _ in range(place):
            next(iterator)
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        for device in ("cuda", None):
            resumed = make(device)
            resumed.load_state_dict(state)
            assert samples(resumed) == samples(whole[place:]), (place, device)
        assert samples(iterator) == samples(whole[place:])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_a_sample_raises_comes_in_its_turn(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(is_late=False).install(monkeypatch)

    class Broken(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            if index == 7:
                raise ArithmeticError("seven")
            return super().__getitem__(index)

    loader = on_device(Broken(12), num_workers=num_workers)
    iterator, found = iter(loader), []
    for _ in range(3):
        found.append(next(iterator)[0, 0].item())
        assert loader.state_dict()["batches"] == len(found)
    with pytest.raises(ArithmeticError, match="seven"):
        next(iterator)
    assert [*found, *(batch[0, 0].item() for batch in iterator)] == [0, 2, 4, 8, 10]


def test_page_locked_batches_are_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, pinned = FakeCuda(is_late=False).install(monkeypatch), []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(epoch_iterator, "pin_batch", lambda batch: (pinned.append(type(batch)), batch)[1])
    assert len(list(on_device(Numbers(6), pin_memory=True))) == 3
    # On the host side of the copy only, where PyTorch leaves what is page-locked as it is.
    assert pinned == [Tensor] * 3
    assert gpu.log.count(("copy", "copies1")) == 3


class Doubles(nn.Module):
    def forward(self, batch: Tensor) -> Tensor:
        return 2 * batch


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_on_the_cpu_the_transform_is_called_when_the_batch_is_asked_for(device: str | None, num_workers: int) -> None:
    called: list[int] = []
    transform = nn.Sequential(Doubles())
    transform.register_forward_hook(lambda *_: called.append(1))
    loader: SharedMemoryLoader[Any] = SharedMemoryLoader(
        Numbers(8, WIDTH), 2, num_workers=num_workers, device=device, device_transform=transform
    )
    for number, batch in enumerate(loader):
        assert len(called) == number + 1
        assert (type(batch), batch[:, 0].tolist()) == (Tensor, [4 * number, 4 * number + 2])


def test_with_nothing_to_do_on_the_cpu_batches_stay_in_their_slots() -> None:
    loader: SharedMemoryLoader[Any] = SharedMemoryLoader(Numbers(8, WIDTH), 2, num_workers=1, device="cpu")
    iterator: Any = iter(loader)
    assert iterator._next_batch.func.__self__ is loader._stream
    assert loader._prefetcher is None


def test_a_loader_can_be_pickled_also_while_batches_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(is_late=False).install(monkeypatch)
    loader = on_device(Numbers(8), num_workers=1, device_transform=nn.Identity(), device_prefetch=3)
    next(iter(loader))
    again = pickle.loads(pickle.dumps(loader))
    assert (again.device, again.device_prefetch) == ("cuda", 3)
    assert np.array_equal([batch.tolist() for batch in again], [batch.tolist() for batch in loader])


def test_a_worker_that_dies_is_replaced_while_batches_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeCuda(3).install(monkeypatch)
    loader = on_device(Numbers(60, WIDTH), num_workers=1)
    iterator = iter(loader)
    found = [gpu.read(next(iterator)) for _ in range(5)]
    assert loader._stream is not None
    (pid,) = loader._stream.pids
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match="was replaced; no sample is lost"):
        found += [gpu.read(batch) for batch in iterator]
    gpu.run_all()
    assert [int(batch[0, 0]) for batch in found] == list(range(0, 60, 2))
