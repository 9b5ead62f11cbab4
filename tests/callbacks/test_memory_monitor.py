from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_hpc.callbacks import StepTrace, memory_monitor
from lightning_hpc.callbacks.memory_monitor import MemoryMonitor
from lightning_hpc.memory.figures import MemoryFigures
from lightning_hpc.trace import diagnose, read_traces
from lightning_hpc.trace.records import MEMORY_FIGURES
from tests.callbacks.fake_step_trace import FakeStepTrace
from tests.callbacks.models import Automatic, make_loader
from tests.callbacks.test_step_trace import make_trainer


class PlainLogger(pl.loggers.logger.DummyLogger):
    """Keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.logged.append((step, dict(metrics)))


@pytest.fixture
def step_trace(monkeypatch: pytest.MonkeyPatch) -> FakeStepTrace:
    monkeypatch.setattr(memory_monitor, "StepTrace", FakeStepTrace)
    return FakeStepTrace()


def fit(monitor: MemoryMonitor, *callbacks: pl.Callback, batches: int = 7, **kwargs: Any) -> PlainLogger:
    logger = PlainLogger()
    make_trainer(monitor, *callbacks, logger=logger, **kwargs).fit(Automatic(), make_loader(batches))
    return logger


@pytest.mark.parametrize(
    ("interval", "log_every", "steps"),
    [
        (3, 50, [1, 3, 6, 7]),
        (None, 4, [1, 4, 7]),
        (None, 0, [1, 7]),
        (7, 50, [1, 7]),
        (1, 50, [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_records_come_after_the_first_batch_at_intervals_and_at_the_end(
    step_trace: FakeStepTrace, interval: int | None, log_every: int, steps: list[int]
) -> None:
    logger = fit(MemoryMonitor(interval), step_trace, log_every_n_steps=log_every)
    assert [step for step, metrics in logger.logged if "memory/used_bytes" in metrics] == steps
    assert len(step_trace.records) == len(steps)


def test_intervals_go_on_over_epochs(step_trace: FakeStepTrace) -> None:
    fit(MemoryMonitor(5), step_trace, max_epochs=3, batches=4)
    assert len(step_trace.records) == len([1, 5, 10, 12])


def test_the_trace_has_gaps_where_the_loggers_have_nothing(step_trace: FakeStepTrace) -> None:
    monitor = MemoryMonitor()
    logger = fit(monitor, step_trace)
    record = step_trace.records[-1]
    assert record.keys() <= set(MEMORY_FIGURES)
    assert (record["memory_hit_rate"], record["memory_retries"], record["gpu_utilization"]) == (None, None, None)
    metrics = logger.logged[-1][1]
    assert metrics == {
        "memory/used_bytes": record["memory_used_bytes"],
        "memory/limit_bytes": record["memory_limit_bytes"],
        "memory/used_share": record["memory_used_bytes"] / record["memory_limit_bytes"],
    }
    assert monitor.peak_bytes == max(each["memory_used_bytes"] for each in step_trace.records)


def test_it_needs_neither_step_trace_nor_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_monitor, "StepTrace", FakeStepTrace)
    monitor = MemoryMonitor()
    make_trainer(monitor).fit(Automatic(), make_loader(2))
    assert monitor.peak_bytes is not None
    assert monitor.peak_bytes > 2**20


def test_the_records_of_a_fit_are_in_its_trace(tmp_path: Path) -> None:
    # After StepTrace, so that the batch is finished for it, too.
    make_trainer(StepTrace(tmp_path, console=False), MemoryMonitor(2)).fit(Automatic(), make_loader(4))
    (trace,) = read_traces(tmp_path)
    assert [(record["epoch"], record["batch"], record["step"]) for record in trace.memory] == [
        (0, 0, 1),
        (0, 1, 2),
        (0, 3, 4),
    ]
    assert all(record["memory_used_bytes"] > 2**20 and record["memory_hit_rate"] is None for record in trace.memory)
    assert not any("memory was not measured" in note for note in diagnose([trace]).notes)


def run_out(place: str) -> None:
    if place == "forward":
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_out_of_memory_leaves_a_record_and_advice(step_trace: FakeStepTrace) -> None:
    trainer = make_trainer(MemoryMonitor(), step_trace)
    with (
        pytest.warns(RuntimeWarning, match=r"rank 0 ran out of memory: .* a smaller batch .* shards the model"),
        pytest.raises(torch.OutOfMemoryError),
    ):
        trainer.fit(Automatic(run_out), make_loader(2))
    assert [name for name, _ in step_trace.events] == ["out_of_memory"]
    assert step_trace.events[0][1]["memory_used_bytes"] == step_trace.records[-1]["memory_used_bytes"]


def fail(place: str) -> None:
    if place == "forward":
        raise KeyError("planted")


def test_another_error_is_none_of_its_business(step_trace: FakeStepTrace) -> None:
    with pytest.raises(KeyError, match="planted"):
        make_trainer(MemoryMonitor(), step_trace).fit(Automatic(fail), make_loader(2))
    assert (step_trace.records, step_trace.events) == ([], [])


def test_the_figures_are_given_back_however_the_fit_ends(
    step_trace: FakeStepTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[MemoryFigures] = []
    monkeypatch.setattr(MemoryFigures, "close", lambda figures: closed.append(figures))
    monitor = MemoryMonitor()
    fit(monitor, step_trace)
    with pytest.raises(KeyError):
        make_trainer(monitor, step_trace).fit(Automatic(fail), make_loader(2))
    assert len(set(map(id, closed))) == len(closed) == 2


def test_an_interval_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="interval=0 is no number of batches"):
        MemoryMonitor(0)
