from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.futures import Future

from lightning_hpc.comm import exposed
from lightning_hpc.comm.exposed import CudaExposedClock, HostExposedClock
from lightning_hpc.comm.stats import CommStats


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time, set by the test."""
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(exposed.time, "perf_counter", lambda: clock.seconds)
    return clock


def test_exposed_is_from_the_last_bucket_computed_to_the_last_one_reduced(now: SimpleNamespace) -> None:
    stats = CommStats()
    clock = HostExposedClock(stats)
    first, last = Future[torch.Tensor](), Future[torch.Tensor]()
    now.seconds = 1.0
    clock.follow(first, is_last=False)
    now.seconds = 2.0
    followed = clock.follow(last, is_last=True)
    now.seconds = 3.0
    last.set_result(torch.zeros(1))  # backends may finish out of order
    assert stats.reductions == 0
    now.seconds = 4.5
    first.set_result(torch.zeros(1))
    assert stats.exposed_seconds == 2.5
    assert stats.reductions == 1
    assert followed.done()


def test_nothing_is_exposed_where_communication_hides_behind_backward(now: SimpleNamespace) -> None:
    stats = CommStats()
    clock = HostExposedClock(stats)
    early, last = Future[torch.Tensor](), Future[torch.Tensor]()
    clock.follow(early, is_last=False)
    early.set_result(torch.zeros(1))
    now.seconds = 2.0
    last.set_result(torch.zeros(1))
    clock.follow(last, is_last=True)
    assert stats.exposed_seconds == 0.0
    assert stats.reductions == 1


def test_an_error_is_passed_on(now: SimpleNamespace) -> None:
    clock = HostExposedClock(CommStats())
    future = Future[Any]()
    followed = clock.follow(future, is_last=True)
    future.set_exception(RuntimeError("planted"))
    with pytest.raises(RuntimeError, match="planted"):
        followed.wait()


class FakeEvent:
    """An event that has passed at a millisecond the test knows; ``passed`` says up to which."""

    times = iter(())
    passed = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Any) -> None:
        self.at: float = next(FakeEvent.times)

    def query(self) -> bool:
        return self.at <= FakeEvent.passed

    def elapsed_time(self, other: "FakeEvent") -> float:
        return other.at - self.at


def test_cuda_events_are_read_in_a_later_step_and_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposed.torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(exposed.torch.cuda, "current_stream", lambda device: None)
    stats = CommStats()
    clock = CudaExposedClock(stats, torch.device("cpu"))

    def step() -> None:
        for is_last in (False, True):
            future = Future[torch.Tensor]()
            future.set_result(torch.zeros(1))  # a CUDA future is complete as soon as the work is issued
            clock.follow(future, is_last)

    # Milliseconds of: bucket 1 reduced, bucket 2 reduced, computed; for two steps.
    FakeEvent.times = iter([10.0, 30.0, 22.0, 110.0, 119.0, 120.0])
    FakeEvent.passed = 25.0
    step()
    assert stats.exposed_seconds == 0.0  # not passed yet, and not waited for
    FakeEvent.passed = 200.0
    step()
    assert stats.exposed_seconds == pytest.approx(8e-3)  # 22 to 30 ms; the second step hid all of it
    assert stats.reductions == 2
