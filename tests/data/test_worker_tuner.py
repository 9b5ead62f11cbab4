"""The policy alone, with workers and a training that are simulated: it finds the number that is worth having, stays
there, and changes little."""

import heapq
import random
from collections.abc import Callable

import pytest

from lightning_hpc.data.worker_tuner import Change, WorkerTuner

Seconds = Callable[[int], float]
"""How long something takes, by the number of the batch."""


class Simulation:
    """A training, and workers that make its batches in order, some ahead.

    Args:
        make_s: For a batch, alone on the machine.
        step_s: Of the training.
        saturation: The number of workers beyond which together they are no faster.
        most: The tuner's.
        num_workers: At first.
        prefetch: Batches that each makes ahead.
    """

    def __init__(
        self,
        make_s: Seconds,
        step_s: Seconds,
        saturation: float = 99,
        most: int = 8,
        num_workers: int = 1,
        prefetch: int = 2,
    ) -> None:
        self.make_s, self.step_s, self.saturation, self.prefetch = make_s, step_s, saturation, prefetch
        self.tuner = WorkerTuner(num_workers, most, prefetch)
        self.workers = num_workers
        self.changes: list[tuple[int, Change]] = []
        self.seconds = 0.0
        self._free_at = [0.0] * num_workers
        self._done_at: list[float] = []
        self._batch = 0

    def run(self, batches: int, epoch: int = 10**9) -> "Simulation":
        """Goes on for so many batches; the pipeline is empty at the beginning of each epoch."""
        asked = self.seconds
        for _ in range(batches):
            if self._batch % epoch == 0:
                self.tuner.skip()
                self._done_at = self._done_at[: self._batch]
            self._fill(asked)
            arrived = max(self._done_at[self._batch], asked)
            step_s = self.step_s(self._batch)
            self._batch += 1
            self._fill(arrived)  # as the stream does: that many besides the one that is used
            change = self.tuner.observe(arrived - asked, step_s)
            if change is not None:
                self._heed(change, arrived)
            asked = self.seconds = arrived + step_s
        return self

    def numbers(self) -> list[int]:
        return [change.num_workers for _, change in self.changes]

    def _fill(self, now: float) -> None:
        while len(self._done_at) < self._batch + self.prefetch * self.workers:
            self._make(now)

    def _make(self, now: float) -> None:
        begun = max(heapq.heappop(self._free_at), now)
        took = self.make_s(len(self._done_at)) * max(1.0, self.workers / self.saturation)
        self._done_at.append(begun + took)
        heapq.heappush(self._free_at, begun + took)

    def _heed(self, change: Change, now: float) -> None:
        assert abs(change.num_workers - self.workers) == 1
        assert change.num_workers == self.tuner.num_workers
        if change.num_workers > self.workers:
            heapq.heappush(self._free_at, now)
        else:
            heapq.heappop(self._free_at)
        self.workers = change.num_workers
        self.changes.append((self._batch, change))


def always(seconds: float) -> Seconds:
    return lambda _: seconds


def noisy(seconds: float, seed: int, spread: float = 0.3) -> Seconds:
    rng = random.Random(seed)
    return lambda _: seconds * rng.lognormvariate(0, spread)


@pytest.mark.parametrize(("make_s", "expected"), [(0.5, 1), (1.5, 2), (3.7, 4), (50.0, 8)])
@pytest.mark.parametrize("start", [1, 8])
@pytest.mark.parametrize("prefetch", [1, 4])
def test_it_takes_as_many_as_keep_up_with_the_training_and_no_more(
    make_s: float, expected: int, start: int, prefetch: int
) -> None:
    simulation = Simulation(always(make_s), always(1.0), num_workers=start, prefetch=prefetch).run(4000)
    found = [simulation.run(100).workers for _ in range(20)]
    assert sorted(found)[10] == expected
    assert max(found) - min(found) <= 1  # a trial


@pytest.mark.parametrize("saturation", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(2))
def test_it_stops_where_further_workers_bring_nothing(saturation: int, seed: int) -> None:
    simulation = Simulation(noisy(10.0, seed), noisy(0.1, seed + 9), saturation=saturation).run(8000)
    assert saturation <= simulation.workers <= saturation + 1


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("make_s", [1.0, 1.7, 2.6, 9.0])
def test_it_changes_little_however_noisy_and_long(make_s: float, seed: int) -> None:
    simulation = Simulation(noisy(make_s, seed, 0.6), noisy(1.0, seed + 99, 0.6), saturation=5)
    simulation.run(10_000)
    assert len(simulation.changes) <= 25
    after = len(simulation.changes)
    simulation.run(10_000)
    assert len(simulation.changes) - after <= 8


def test_it_never_goes_beyond_its_limit_or_below_one() -> None:
    for most in (1, 3):
        simulation = Simulation(always(50.0), always(0.1), most=most).run(3000)
        assert set(simulation.numbers()) <= set(range(1, most + 1))
        assert simulation.workers == most
    assert Simulation(always(0.01), always(1.0), num_workers=3).run(6000).workers == 1


def test_a_training_that_never_waits_has_no_change_with_one_worker() -> None:
    assert not Simulation(always(0.5), always(1.0)).run(10_000).changes


def test_a_validation_or_a_checkpoint_now_and_then_does_not_matter() -> None:
    def step_s(batch: int) -> float:
        return 500.0 if batch % 100 == 50 else 1.0

    waiting = Simulation(always(3.7), step_s).run(10_000)
    assert waiting.workers == 4
    assert not Simulation(always(0.5), step_s).run(10_000).changes


def test_the_start_of_the_workers_and_of_epochs_does_not_matter() -> None:
    def make_s(batch: int) -> float:
        return 20.0 if batch % 200 < 3 else 0.5

    assert not Simulation(make_s, always(1.0)).run(20_000, epoch=200).changes
    assert not Simulation(make_s, always(1.0)).run(2000, epoch=12).changes


def test_it_follows_a_load_that_changes_and_comes_back() -> None:
    load = [0.5]
    simulation = Simulation(lambda _: load[0], always(1.0))
    # What waits is fed soon. One that has more than it needs finds out when the next trial is due.
    for load[0], batches, expected in [(0.5, 5000, 1), (3.7, 5000, 4), (0.5, 40_000, 1), (3.7, 5000, 4)]:
        simulation.run(batches)
        assert simulation.workers == expected, simulation.numbers()


def test_little_is_lost_by_trials() -> None:
    for make_s in (0.9, 1.9, 3.8):
        simulation = Simulation(always(make_s), always(1.0), num_workers=int(make_s) + 1)
        assert simulation.run(10_000).seconds < 10_000 * 1.02


def test_reasons_say_what_was_seen() -> None:
    changes = Simulation(always(1.5), always(1.0), num_workers=1).run(8000).changes
    reasons = [change.reason for _, change in changes]
    assert reasons[0] == "the training waits 33% of the time"
    assert "the training does not wait, and one fewer may suffice" in reasons
    assert any(reason.startswith("with 1 it waits 3") for reason in reasons)
    saturated = Simulation(always(1.5), always(1.0), saturation=1).run(3000).changes
    assert saturated[1][1].reason == "another one brought 0% more batches a second"


def test_it_asks_for_no_more_after_one_could_not_be_started() -> None:
    simulation = Simulation(lambda _: 4.0, lambda _: 1.0, num_workers=2).run(200)
    assert simulation.tuner.num_workers > 2
    tuner = WorkerTuner(2, 8)
    changes = [change for _ in range(200) if (change := tuner.observe(1.0, 0.1)) is not None]
    assert changes[0].num_workers == 3
    tuner = WorkerTuner(2, 8)
    while tuner.observe(1.0, 0.1) is None:
        pass
    tuner.forbid_more()
    assert all(tuner.observe(1.0, 0.1) is None for _ in range(1000))
    assert tuner.num_workers == 2
