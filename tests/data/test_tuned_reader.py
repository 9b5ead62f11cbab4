"""What the tuner is told, and when what it decides is done; by a clock that the test turns."""

import time
from typing import Any, cast

import pytest

from lightning_hpc.data.tuned_reader import TunedReader
from lightning_hpc.data.worker_tuner import Change


class Stream:
    """Hands out numbers, each after so many seconds."""

    def __init__(self, clock: list[float], waits: list[float]) -> None:
        self.clock, self.waits = clock, waits
        self.waited_s = 0.0
        self.is_settled = True
        self.sizes: list[int] = []
        self.number = -1
        self.fails = False

    def next(self) -> int:
        self.number += 1
        if self.number == len(self.waits):
            raise StopIteration
        self.waited_s = self.waits[self.number]
        self.clock[0] += self.waited_s + 0.25  # unpacking is neither waiting nor training
        return self.number

    def resize(self, num_workers: int) -> None:
        if self.fails:
            raise OSError(24, "Too many open files")
        self.sizes.append(num_workers)


class Tuner:
    """Remembers what it is told, and wants what the test says."""

    def __init__(self) -> None:
        self.told: list[tuple[float, float]] = []
        self.wanted: list[Change | None] = []
        self.skipped = 0
        self.is_forbidden = False

    def forbid_more(self) -> None:
        self.is_forbidden = True

    def skip(self) -> None:
        self.skipped += 1

    def observe(self, wait_s: float, step_s: float) -> Change | None:
        self.told.append((wait_s, step_s))
        return self.wanted.pop() if self.wanted else None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_it_tells_waits_and_steps_but_not_of_the_first_batch_of_an_epoch(clock: list[float]) -> None:
    stream, tuner = Stream(clock, [9.0, 0.0, 2.0]), Tuner()
    reader = TunedReader(cast(Any, stream), stream.next, cast(Any, tuner), lambda _: None)
    for step_s in (1.0, 3.0, 5.0):
        reader.next()
        clock[0] += step_s
    with pytest.raises(StopIteration):
        reader.next()
    assert tuner.told == [(0.0, 1.0), (2.0, 3.0)]
    assert tuner.skipped == 1


def test_a_change_is_made_and_announced_and_nothing_told_until_all_workers_are_there(clock: list[float]) -> None:
    stream, tuner, announced = Stream(clock, [0.0] * 9), Tuner(), list[Change]()
    reader = TunedReader(cast(Any, stream), stream.next, cast(Any, tuner), announced.append)
    change = Change(3, "of the test")
    reader.next()
    tuner.wanted.append(change)
    assert reader.next() == 1
    assert (stream.sizes, announced) == ([3], [change])
    told = len(tuner.told)
    stream.is_settled = False
    reader.next()
    reader.next()
    assert len(tuner.told) == told
    stream.is_settled = True
    reader.next()
    stream.is_settled = False  # a worker that died is replaced
    reader.next()
    assert len(tuner.told) == told + 2


def test_where_no_worker_can_be_started_the_batch_is_there_and_there_will_be_no_more(clock: list[float]) -> None:
    stream, tuner = Stream(clock, [0.0] * 3), Tuner()
    stream.fails, tuner.wanted = True, [Change(3, "it waits")]
    announced: list[Change] = []
    reader = TunedReader(cast(Any, stream), stream.next, cast(Any, tuner), announced.append)
    assert reader.next() == 0
    with pytest.warns(UserWarning, match="no further worker can be started.*Too many open files"):
        assert reader.next() == 1
    assert reader.next() == 2
    assert tuner.is_forbidden
    assert not announced
