"""`num_workers="auto"`: found at first, changed in use without a trace in the batches, and known to Lightning."""

import itertools
import os
import pickle
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.data import _replace_dunder_methods, _update_dataloader
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hpc.data import automatic_workers, autotune
from lightning_hpc.data.autotune import Sweep
from lightning_hpc.data.batch_stream import BatchStream
from lightning_hpc.data.loader import SharedMemoryLoader
from lightning_hpc.data.seeding import KeptGenerators
from lightning_hpc.data.worker_tuner import Change, WorkerTuner
from tests.data.datasets import Augmented, Numbers, Parts, assert_same
from tests.data.modules import Drawn, Remembers, make_trainer


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(automatic_workers, "rank_zero_info", lines.append)
    return lines


@pytest.fixture
def nine_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(9))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch, nine_processors: None) -> Callable[[int], None]:
    def find(num_workers: int) -> None:
        monkeypatch.setattr(automatic_workers, "sweep", lambda *_: Sweep(num_workers, {}, "as the test says"))

    return find


class Restless(WorkerTuner):
    """Wants another number every third batch."""

    def observe(self, wait_s: float, step_s: float) -> Change | None:
        assert wait_s >= 0
        assert step_s >= 0
        self._skipped += 1
        if self._skipped % 3:
            return None
        self._num_workers = self._num_workers % 4 + 1
        return Change(self._num_workers, "of the test")


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch, finds: Callable[[int], None]) -> None:
    finds(2)
    monkeypatch.setattr(automatic_workers, "WorkerTuner", Restless)
    monkeypatch.setattr(BatchStream, "is_settled", True)  # not to depend on how fast workers start


class Slow(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        time.sleep(5e-3)
        return super().__getitem__(index)


def test_it_is_found_by_reading(nine_processors: None, said: list[str]) -> None:
    with KeptGenerators():
        before = torch.get_rng_state()
        assert SharedMemoryLoader(Slow(1000), 4, shuffle=True, num_workers="auto").num_workers > 0
        assert torch.equal(before, torch.get_rng_state())
    assert said[0].startswith("SharedMemoryLoader of a Slow: num_workers=")
    assert "batches/s by workers: 1: " in said[0]


def test_it_changes_while_it_is_used_and_the_batches_stay_the_same(restless: None, said: list[str]) -> None:
    with KeptGenerators():
        torch.manual_seed(7)
        expected = list(SharedMemoryLoader(Augmented(40), 2, shuffle=True))
        for persistent_workers in (None, False):
            torch.manual_seed(7)
            loader = SharedMemoryLoader(
                Augmented(40), 2, shuffle=True, num_workers="auto", persistent_workers=persistent_workers
            )
            found, numbers = [], set()
            for batch in loader:
                found.append(batch)
                numbers.add(loader.num_workers)
            assert_same(found, expected)
            assert numbers == {1, 2, 3, 4}
            assert len(list(loader)) == 20
    assert said[0] == "SharedMemoryLoader of a Augmented: num_workers=2, as the test says"
    assert said[1] == "SharedMemoryLoader of a Augmented: num_workers=3 from now on, as of the test"


def test_the_workers_that_there_are_follow(restless: None, said: list[str]) -> None:
    loader = SharedMemoryLoader(Numbers(10**6), num_workers="auto")
    for position, batch in enumerate(itertools.islice(loader, 100)):
        assert int(batch[0, 0]) == position
        assert loader._stream is not None
        assert loader._stream._pool._wanted == loader.num_workers


@pytest.mark.parametrize("number", [0, 3])
def test_a_number_that_is_given_or_set_stays(number: int, restless: None, said: list[str]) -> None:
    given = SharedMemoryLoader(Numbers(60), num_workers=number)
    chosen = SharedMemoryLoader(Numbers(60), num_workers="auto")
    chosen.num_workers = number
    chosen.share_processors(4)
    for loader in (given, chosen):
        assert len(list(loader)) == 60
        assert loader.num_workers == number
    assert len(said) == 1


def test_none_at_first_and_parts_of_an_iterable_dataset_stay(
    finds: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(automatic_workers, "WorkerTuner", Restless)
    finds(0)
    loader = SharedMemoryLoader(Numbers(60), num_workers="auto", persistent_workers=True, prefetch_factor=4)
    assert (len(list(loader)), loader.num_workers) == (60, 0)
    finds(1)
    parts = SharedMemoryLoader(Parts(60), num_workers="auto")
    assert (len(list(parts)), parts.num_workers) == (60, 1)
    assert len(said) == 2


def test_ranks_share_the_processors(finds: Callable[[int], None], said: list[str]) -> None:
    finds(7)
    loader = SharedMemoryLoader(Numbers(9), num_workers="auto")
    assert loader._automatic is not None
    assert loader._automatic.most == 8
    loader.share_processors(2)
    assert (loader.num_workers, loader._automatic.most) == (3, 3)
    loader.share_processors(8)
    assert (loader.num_workers, loader._automatic.most, loader._automatic._tuner) == (1, 1, None)


def test_a_loader_that_is_pickled_goes_on_with_its_number(restless: None, said: list[str]) -> None:
    loader = SharedMemoryLoader(Numbers(10), num_workers="auto")
    list(loader)
    again = pickle.loads(pickle.dumps(loader))
    assert again.num_workers == loader.num_workers != 2
    assert len(list(again)) == 10


@pytest.mark.parametrize("is_made_in_a_hook", [False, True])
def test_lightning_makes_a_loader_from_it_that_is_automatic_too(
    is_made_in_a_hook: bool, restless: None, said: list[str]
) -> None:
    with _replace_dunder_methods(DataLoader, "dataset") if is_made_in_a_hook else KeptGenerators():
        loader = SharedMemoryLoader(Numbers(40), 2, num_workers="auto")
        list(loader)
        assert loader.num_workers != 2
    again = _update_dataloader(loader, loader.sampler)
    assert isinstance(again, SharedMemoryLoader)
    assert again.num_workers == 2
    assert again._stream is None
    assert [int(batch[0, 0]) for batch in again] == list(range(0, 40, 2))
    assert again.num_workers != 2
    assert len([line for line in said if "as the test says" in line]) == 2


@pytest.mark.filterwarnings("ignore")  # Lightning's, of few workers and missing steps
def test_a_training_sees_the_same_batches(restless: None, said: list[str]) -> None:
    seen = []
    for num_workers in (0, "auto"):
        pl.seed_everything(1, verbose=False)
        model: Any = Remembers()
        loader: Any = SharedMemoryLoader(Drawn(), 2, shuffle=True, num_workers=num_workers)  # type: ignore[arg-type]
        make_trainer(max_epochs=2).fit(model, loader)
        seen.append(model.seen)
        loader.close()
    assert seen[0] == seen[1]
    assert len(said) > 10


def test_a_training_that_waits_gets_workers_and_one_that_does_not_keeps_one(
    finds: Callable[[int], None], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finds(1)
    is_hungry = [False]

    class Told(WorkerTuner):
        def observe(self, wait_s: float, step_s: float) -> Change | None:
            return super().observe(0.5 / self._num_workers if is_hungry[0] else 0.0, 0.1)

    monkeypatch.setattr(automatic_workers, "WorkerTuner", Told)
    batches = iter(loader := SharedMemoryLoader(Numbers(10**6), num_workers="auto"))
    for _ in range(600):
        next(batches)
    assert loader.num_workers == 1
    is_hungry[0] = True
    deadline = time.monotonic() + 60
    while loader.num_workers < 4:
        next(batches)
        assert time.monotonic() < deadline


def test_the_sweep_is_short_for_the_slowest_of_datasets(
    nine_processors: None, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotune, "_BUDGET_S", 0.2)

    class Endless(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            time.sleep(10**6)
            raise AssertionError

    begun = time.monotonic()
    assert SharedMemoryLoader(Endless(9), num_workers="auto").num_workers == 8
    assert time.monotonic() - begun < 60
