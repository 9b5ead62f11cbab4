"""`TrainingStepHook`: something round every training step of a Trainer, with its backward and its optimizer step."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from torch import nn


@dataclass(frozen=True)
class StepMark:
    """What Lightning knows before a step.

    Attributes:
        results: What holds the values logged so far.
        counts: Counters of the loop, and what they hold.
    """

    results: list[nn.Module]
    counts: list[tuple[Any, dict[str, int]]]


class TrainingStepHook:
    """Has a function run each training step of a fit. Lightning has no public place for that: it is all in here.

    Args:
        trainer: The Trainer.
        run: Called with a function that runs the step, which may be called again after `forget`, and with the batch;
            with None for a batch that the step itself takes from an iterator. Returns what the step returns.
        backward: Called in the place of the precision plugin's ``backward``, with that method first.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        run: Callable[[Callable[[], Any], Any], Any],
        backward: Callable[..., None],
    ) -> None:
        self._trainer = trainer
        self._run = run
        epoch_loop = trainer.fit_loop.epoch_loop
        self._loop: Any
        if trainer.lightning_module.automatic_optimization:
            self._loop = epoch_loop.automatic_optimization
            progresses = [self._loop.optim_progress.optimizer.step, self._loop.optim_progress.optimizer.zero_grad]
        else:
            self._loop = epoch_loop.manual_optimization
            progresses = [self._loop.optim_step_progress]
        self._trackers = [tracker for each in progresses for tracker in (each.total, each.current)]
        self._step = self._loop.run
        self._loop.__dict__["run"] = self._run_step
        self._plugin: Any = trainer.precision_plugin
        self._plugin.__dict__["backward"] = functools.partial(backward, self._plugin.backward)

    def mark(self) -> "StepMark":
        """Notes what Lightning knows before a step."""
        results = self._trainer._results
        return StepMark(
            [] if results is None else list(results.values()),
            [(tracker, dict(vars(tracker))) for tracker in self._trackers],
        )

    def forget(self, mark: "StepMark") -> None:
        """Has Lightning forget the step that was begun after ``mark`` and not ended."""
        logged = self._trainer._results
        if logged is not None:
            for key in [key for key, value in logged.items() if not any(value is result for result in mark.results)]:
                del logged[key]
        for tracker, counts in mark.counts:
            vars(tracker).update(counts)

    def remove(self) -> None:
        """Takes the function away."""
        self._loop.__dict__.pop("run", None)
        self._plugin.__dict__.pop("backward", None)

    def _run_step(self, *args: Any, **kwargs: Any) -> Any:
        inputs = args[-1] if args else kwargs["kwargs"]
        return self._run(lambda: self._step(*args, **kwargs), inputs.get("batch"))
