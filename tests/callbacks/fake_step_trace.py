"""A `StepTrace` that writes nothing, and whose iterations come from a test."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_hpc.trace import Trace
from lightning_hpc.trace.records import PHASES


class FakeStepTrace(Callback):
    """Takes the place of `StepTrace` in a module under test."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Sequence[float | None]], None]] = []
        self.records: list[dict[str, Any]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    @classmethod
    def find(cls, trainer: pl.Trainer) -> "FakeStepTrace | None":
        return next((each for each in trainer.callbacks if isinstance(each, cls)), None)  # type: ignore[attr-defined]

    def listen(self, listener: Callable[[Sequence[float | None]], None]) -> None:
        self.listeners.append(listener)

    def write_memory(self, figures: dict[str, Any]) -> None:
        self.records.append(figures)

    def write_event(self, name: str, details: dict[str, Any]) -> None:
        self.events.append((name, details))

    def play(self, trace: Trace, start: int = 0, stop: int | None = None) -> None:
        """Hands out iterations of a synthetic run."""
        for step in trace.steps[start:stop]:
            times = [step[f"{name}_ms"] for name in (*PHASES, "total")]
            for listener in self.listeners:
                listener((*times, step["epoch"], step["batch"]))


class FakeLogger:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))
