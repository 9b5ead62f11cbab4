"""Workers only where batches take longer to make than to hand over; by a clock that the test turns."""

import os
import time
from collections.abc import Iterator

import pytest
import torch

from lightning_hpc.data.autotune import choose_num_workers, spare_processors
from tests.data.modules import Drawn, Stream


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6))
    return now


def choose(clock: list[float], took_s: list[float], dataset: object = None) -> int:
    def read(count: int) -> Iterator[int]:
        torch.rand(1)
        for each in took_s[:count]:
            clock[0] += each
            yield 0

    return choose_num_workers(read, Drawn() if dataset is None else dataset)


def test_cheap_batches_get_no_worker_and_expensive_ones_the_processors_to_spare(clock: list[float]) -> None:
    assert choose(clock, [3.0, 1e-5, 1e-5, 1e-5]) == 0  # the first one waits for the worker to start
    assert choose(clock, [3.0, 0.1, 0.1, 0.1]) == 5
    assert choose(clock, [3.0, 1e-5, 0.7, 1e-5]) == 0  # one hiccup
    assert choose(clock, [3.0, 0.1, 0.1, 0.1], Stream()) == 1


def test_a_dataset_too_short_to_tell_gets_no_worker(clock: list[float]) -> None:
    assert choose(clock, []) == choose(clock, [3.0]) == 0


def test_the_trial_leaves_no_trace_in_the_generators(clock: list[float]) -> None:
    before = torch.get_rng_state()
    choose(clock, [0.1] * 4)
    assert torch.equal(before, torch.get_rng_state())


def test_ranks_share_the_processors_of_a_machine(clock: list[float]) -> None:
    assert [spare_processors(ranks) for ranks in (1, 2, 3, 6, 12)] == [5, 2, 1, 1, 1]
