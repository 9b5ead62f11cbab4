"""The sweep finds where more workers bring no more, in two seconds, with workers and a clock that are simulated."""

import os
import re

import pytest

from lightning_hpc.data.autotune import Sweep, spare_processors, sweep


class Workers:
    """A `Trial` of workers that each take as long for a batch.

    Args:
        make_s: Of one alone.
        saturation: The number beyond which together they are no faster.
        batches: How many there are.
        start_s: Until a worker is ready.
        hiccup: The batch that takes a second longer.
    """

    def __init__(
        self, make_s: float, saturation: int = 99, batches: int = 10**9, start_s: float = 0.02, hiccup: int = -1
    ) -> None:
        self.make_s, self.saturation, self.batches, self.start_s, self.hiccup = (
            *(make_s, saturation, batches, start_s, hiccup),
        )
        self.now = 0.0
        self.made = 0
        self.tried: list[int] = [1]
        self._ready_at = start_s
        self._done_at = [start_s + make_s]

    @property
    def is_ready(self) -> bool:
        return self.now >= self._ready_at

    def clock(self) -> float:
        return self.now

    def resize(self, num_workers: int) -> None:
        self.tried.append(num_workers)
        added = num_workers - len(self._done_at)
        if added:
            self._ready_at = self.now + self.start_s
        self._done_at += [self.now + self.start_s + self._took()] * added

    def read(self, timeout_s: float) -> bool | None:
        if self.made == self.batches:
            return None
        first = min(self._done_at)
        if first > self.now + timeout_s:
            self.now += max(timeout_s, 0)
            return False
        self.now = max(self.now, first)
        self._done_at.remove(first)
        self._done_at.append(self.now + self._took())
        self.made += 1
        return True

    def _took(self) -> float:
        slowed = self.make_s * max(1.0, self.tried[-1] / self.saturation)
        return slowed + (self.made == self.hiccup)


def found(workers: Workers, most: int = 8) -> Sweep:
    return sweep(workers, most, workers.clock)


def test_cheap_batches_get_no_worker() -> None:
    assert found(Workers(1e-5)).num_workers == 0
    assert found(Workers(1e-5, hiccup=2)).num_workers == 0
    assert str(found(Workers(4e-4))) == (
        "0, as a batch is made faster than it is worth handing over (batches/s by workers: 1: 2.5e+03)"
    )


@pytest.mark.parametrize("make_s", [0.001, 0.01, 0.04])
@pytest.mark.parametrize("saturation", [1, 2, 4])
def test_it_stops_where_more_workers_bring_no_more(make_s: float, saturation: int) -> None:
    workers = Workers(make_s, saturation)
    result = found(workers)
    assert result.num_workers == saturation
    assert list(result.batches_s) == [1, 2, 4, 8][: saturation.bit_length() + 1]
    assert max(result.batches_s.values()) == pytest.approx(saturation / make_s, rel=0.2)
    assert re.fullmatch(rf"as {2 * saturation} bring \d% more", result.reason)
    assert workers.now < 2.1


def test_it_takes_all_that_are_spare_while_they_bring_more() -> None:
    for most, tried in ((8, [1, 2, 4, 8]), (5, [1, 2, 4, 5]), (2, [1, 2])):
        workers = Workers(0.01)
        result = found(workers, most)
        assert (result.num_workers, result.reason) == (most, "the most there may be")
        assert list(result.batches_s) == tried
        assert workers.tried[1:] == tried


def test_with_one_processor_to_spare_there_is_one_worker() -> None:
    workers = Workers(0.01)
    assert found(workers, 1).num_workers == 1
    assert workers.now < 0.1


@pytest.mark.parametrize("make_s", [0.3, 1.0, 30.0])
def test_slow_batches_make_it_no_longer(make_s: float) -> None:
    workers = Workers(make_s)
    result = found(workers)
    assert (result.num_workers, result.batches_s) == (8, {})
    assert "too slow" in result.reason
    assert workers.now < 2.1


def test_what_was_seen_counts_if_the_time_is_short() -> None:
    workers = Workers(0.15, saturation=2)
    result = found(workers)
    assert result.num_workers in (2, 8)  # as far as it came
    assert result.batches_s
    assert workers.now < 2.1


def test_workers_that_take_seconds_to_start_are_waited_for_once() -> None:
    workers = Workers(0.01, start_s=4.0)
    assert found(workers).num_workers == 8
    assert workers.now < 6.1
    never = Workers(0.01, start_s=1e6)
    assert found(never).num_workers == 8
    assert never.now < 12.1


@pytest.mark.parametrize("batches", [0, 1, 3])
def test_a_dataset_too_short_to_tell_gets_no_worker(batches: int) -> None:
    assert str(found(Workers(0.01, batches=batches))) == "0, as there are too few batches to tell"


def test_batches_that_end_within_the_sweep_leave_it_at_what_was_seen() -> None:
    assert found(Workers(0.001, batches=100)).num_workers == 8


def test_ranks_share_the_processors_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert [spare_processors(ranks) for ranks in (None, 1, 2, 3, 6, 12)] == [5, 5, 2, 1, 1, 1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert spare_processors() == 2
    assert spare_processors(1) == 5
