import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_hpc.callbacks import straggler_monitor
from lightning_hpc.callbacks.straggler_monitor import StragglerMonitor
from lightning_hpc.trace.stragglers import Straggler
from tests.callbacks.fake_step_trace import FakeLogger, FakeStepTrace
from tests.helpers import run_ranks
from tests.trace.synthetic_runs import JOBS, Job, Slow, simulate

MODULE: Any = None  # hooks get the module, and none of ours looks at it


def job_of(ranks: int) -> Job:
    return JOBS[f"{ranks} ranks"]


class Fit:
    """A fit of one rank, whose iterations are those of a synthetic run."""

    def __init__(self, rank: int, world_size: int, interval: int = 50) -> None:
        vars(straggler_monitor)["StepTrace"] = FakeStepTrace
        straggler_monitor._LAST_WAIT_S = 60.0  # the machine may be busy
        self.step_trace, self.logger, self.lines = FakeStepTrace(), FakeLogger(), Lines()
        self.monitor = StragglerMonitor(interval)
        self.rank = rank
        self.trainer = self.make_trainer(world_size)
        self.monitor.setup(self.trainer, MODULE, "fit")
        self.monitor.on_train_start(self.trainer, MODULE)

    def make_trainer(self, world_size: int) -> Any:
        """As much of a Trainer as the monitor asks for."""
        callbacks = [self.monitor, self.step_trace]
        state = {"callbacks": callbacks, "loggers": [self.logger], "global_step": 7}
        return SimpleNamespace(world_size=world_size, is_global_zero=self.rank == 0, **state)

    def play(self, steps: int, seed: int, *slow: Slow) -> None:
        """As many iterations, with time enough for each exchange."""
        traces = simulate(job_of(self.trainer.world_size), seed, steps=steps, slow=slow, variation=0.02)
        for start in range(0, steps, 50):
            self.step_trace.play(traces[self.rank], start, start + 50)
            while self.monitor._is_waiting and start + 50 < steps:
                self.monitor._receive()

    def run_ahead(self, steps: int) -> None:
        """As many iterations at once."""
        straggler_monitor._LAST_WAIT_S = 0.1
        self.step_trace.play(simulate(job_of(self.trainer.world_size), 0, steps=steps)[self.rank])

    def end(self) -> None:
        self.monitor.on_train_end(self.trainer, MODULE)
        self.monitor.teardown(self.trainer, MODULE, "fit")


class Lines(logging.Handler):
    """What is logged for the user."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        assert record.levelno == logging.INFO
        self.texts.append(record.getMessage())


def name(stragglers: tuple[Straggler, ...]) -> list[tuple[int, str]]:
    return [(each.rank, each.cause) for each in stragglers]


def watch_slow_data(rank: int, world_size: int) -> dict[str, Any]:
    fit = Fit(rank, world_size)
    fit.play(150, 0, Slow(1, "data_prep", 0.5))
    fit.end()
    return {
        "stragglers": fit.monitor.stragglers,
        "lost": fit.monitor.lost_seconds,
        "events": fit.step_trace.events,
        "metrics": fit.logger.logged,
        "lines": fit.lines.texts,
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_slow_rank_is_named_with_cause_and_cost(ranks: int) -> None:
    first, *others = run_ranks(watch_slow_data, ranks)
    assert name(first["stragglers"]) == [(1, "data")]
    # All ranks know, without any further exchange, and rank 0 alone says so.
    assert all(other["stragglers"] == first["stragglers"] for other in others)
    assert not any(other["events"] or other["metrics"] or other["lost"] for other in others)

    assert [(event, details["change"]) for event, details in first["events"]] == [("straggler", "appeared")]
    details = first["events"][0][1]
    assert (details["rank"], details["cause"], details["phase"]) == (1, "data", "data_prep")
    step_ms = job_of(ranks).step_ms
    assert details["repaired_ms"] == pytest.approx(details["step_ms"] - 0.5 * step_ms, rel=0.05)
    # Three windows, the first without the warm-up.
    assert first["lost"] == pytest.approx(0.147 * 0.5 * step_ms, rel=0.05)

    assert len(first["metrics"]) == 3
    for step, metrics in first["metrics"]:
        assert step == 7
        assert metrics["straggler/rank"] == 1
        assert metrics["straggler/lost_share"] == pytest.approx(1 / 3, abs=0.03)
        assert metrics["straggler/excess_ms"] == pytest.approx(0.5 * step_ms, rel=0.05)
    told, summary = first["lines"]
    assert told.startswith("StragglerMonitor: rank 1 is slow by data (data_prep): ")
    assert summary.startswith("StragglerMonitor: slow ranks cost ")
    assert summary.endswith(f"in 147 steps: rank 1 by data {first['lost']:.1f} s")


def watch_equal_ranks(rank: int, world_size: int) -> tuple[Any, ...]:
    fit = Fit(rank, world_size)
    fit.play(100, 1)
    fit.end()
    return fit.monitor.stragglers, fit.step_trace.events, fit.logger.logged, fit.lines.texts


def test_nobody_is_blamed_where_ranks_are_equal() -> None:
    (stragglers, events, logged, lines), _ = run_ranks(watch_equal_ranks, 2)
    assert (stragglers, events) == ((), [])
    assert [metrics for _, metrics in logged] == [{"straggler/lost_share": 0}] * 2
    (summary,) = lines
    assert summary.startswith("StragglerMonitor: no rank was slow alone in ")


def come_and_go(rank: int, world_size: int) -> list[tuple[str, int]]:
    fit = Fit(rank, world_size)
    for steps, slow in ((50, ()), (100, (Slow(0, "compute", 0.5),)), (100, ())):
        fit.play(steps, 0, *slow)
    fit.end()
    return [(details["change"], details["rank"]) for _, details in fit.step_trace.events]


def test_a_straggler_that_comes_and_goes_is_told_twice() -> None:
    assert run_ranks(come_and_go, 2)[0] == [("appeared", 0), ("gone", 0)]


def fit_twice(rank: int, world_size: int) -> list[Any]:
    fit = Fit(rank, world_size)
    fit.play(50, 0, Slow(1, "data_prep", 0.5))
    fit.end()
    lost = fit.monitor.lost_seconds
    fit.step_trace.listeners.clear()
    fit.monitor.setup(fit.trainer, MODULE, "fit")
    fit.monitor.on_train_start(fit.trainer, MODULE)
    between = fit.monitor.stragglers, fit.monitor.lost_seconds
    fit.play(50, 0, Slow(1, "data_prep", 0.5))
    fit.end()
    return [lost, between, fit.monitor.lost_seconds]


def test_a_second_fit_starts_anew() -> None:
    first, between, second = run_ranks(fit_twice, 2)[0]
    assert between == ((), 0)
    assert first == second > 0


def end_unevenly(rank: int, world_size: int) -> list[tuple[int, str]]:
    fit = Fit(rank, world_size)
    fit.play(50, 0, Slow(1, "data_prep", 0.5))
    dist.barrier()
    while not fit.monitor.stragglers:
        fit.monitor._receive()
    if rank == 0:
        fit.run_ahead(100)  # which nobody answers
    fit.end()
    dist.barrier()
    return name(fit.monitor.stragglers)


def test_a_rank_that_has_less_to_do_keeps_nobody_waiting() -> None:
    assert run_ranks(end_unevenly, 2) == [[(1, "data")], [(1, "data")]]


def fail_on_one_rank(rank: int, world_size: int) -> str:
    fit = Fit(rank, world_size)
    fit.play(50, 0)
    if rank == 1:
        fit.monitor.on_exception(fit.trainer, MODULE, RuntimeError("lost"))
        fit.step_trace.play(simulate(job_of(2), 0)[0])  # what comes late is ignored
        return "failed"
    fit.run_ahead(1500)
    fit.end()
    return "ended"


def test_a_rank_that_fails_keeps_nobody_waiting() -> None:
    assert run_ranks(fail_on_one_rank, 2) == ["ended", "failed"]


def test_one_rank_alone_has_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(straggler_monitor, "StepTrace", FakeStepTrace)
    monkeypatch.setattr(straggler_monitor, "_LAST_WAIT_S", 60.0)
    fit = Fit(0, 1)
    fit.end()
    assert fit.step_trace.listeners == []
    assert (fit.monitor.stragglers, fit.monitor.lost_seconds, fit.lines.texts) == ((), 0, [])


def test_without_a_step_trace_the_way_out_is_told() -> None:
    monitor = StragglerMonitor()
    trainer: Any = SimpleNamespace(callbacks=[monitor])
    with pytest.raises(ValueError, match=r"callbacks=\[StepTrace\(\), StragglerMonitor\(\)\]"):
        monitor.setup(trainer, MODULE, "fit")
    monitor.setup(trainer, MODULE, "validate")


def test_an_interval_that_tells_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"interval=32 .* give 33 or more"):
        StragglerMonitor(32)
    StragglerMonitor(33)
