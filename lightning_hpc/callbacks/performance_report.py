"""`PerformanceReport`: a page about the run, made at its end."""

import warnings
from itertools import accumulate
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_hpc.callbacks.step_trace import StepTrace
from lightning_hpc.report.run_files import write_report
from lightning_hpc.trace.reader import Trace, read_trace

# Records take some seven times as much memory as their lines.
_MOST_BYTES = 256 * 10**6


class PerformanceReport(Callback):
    """Writes ``report.html`` and ``report.json`` at the end of a fit, also of one that an exception ends.

    They are those of ``lightning-hpc report``, with the last values of what the module has logged. Rank 0 makes them
    from the files of `StepTrace` that it can see, those of other hosts only on a shared disk; the report names the
    ranks that are missing. It waits until all have written theirs; after an exception it does not, and their last
    iterations may be missing. Of a very long run on many ranks it reads the first ones, up to 256 MB; the command
    reads all. What goes wrong with a report is a warning, never the end of a training.

    Args:
        dirpath: Where to. None means the directory of the attempt, beside the traces.

    Attributes:
        path: The page of the last fit; None before it is there, and on other ranks than 0.

    Raises:
        ValueError: At set-up, if the Trainer has no `StepTrace`.
    """

    def __init__(self, dirpath: str | Path | None = None) -> None:
        super().__init__()
        self._dirpath = None if dirpath is None else Path(dirpath).absolute()
        self._is_due = self._is_awaited = False
        self._metrics: dict[str, float] = {}
        self.path: Path | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if StepTrace.find(trainer) is None:
            raise ValueError(
                "PerformanceReport reports on what StepTrace records, which the Trainer does not have; give"
                " Trainer(callbacks=[StepTrace(), PerformanceReport()])"
            )
        self.path = None
        self._metrics = {}
        self._is_due = trainer.is_global_zero
        self._is_awaited = trainer.world_size > 1

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # On all ranks, since metrics may have to be gathered.
        self._metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._is_awaited = False  # who knows where the others are
        self._make(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._is_awaited:
            self._is_awaited = False
            self._wait_for_files(trainer)
        self._make(trainer)

    def _wait_for_files(self, trainer: pl.Trainer) -> None:
        step_trace = StepTrace.find(trainer)
        if step_trace is not None:
            step_trace.finish()
        try:
            trainer.strategy.barrier("PerformanceReport")
        except RuntimeError as error:
            warnings.warn(
                f"PerformanceReport does not wait for a rank that is gone: {error}", RuntimeWarning, stacklevel=2
            )

    def _make(self, trainer: pl.Trainer) -> None:
        if not self._is_due:
            return
        self._is_due = False
        step_trace = StepTrace.find(trainer)
        if step_trace is None or step_trace.path is None:
            return
        step_trace.finish()
        try:
            self._write(step_trace.path.parent)
        except Exception as error:
            warnings.warn(f"PerformanceReport could not be made: {error}", RuntimeWarning, stacklevel=2)

    def _write(self, attempt: Path) -> None:
        traces = _read(attempt)
        if traces and not any(trace.steps for trace in traces):  # nothing was trained
            return
        report, self.path = write_report(traces, self._dirpath or attempt, attempt, self._metrics)
        rank_zero_info(f"PerformanceReport: {report.diagnosis.headline}\nPerformanceReport: {self.path}")


def _read(attempt: Path) -> list[Trace]:
    """The attempt's files; one that another rank has not got to its first line yet is none."""
    sizes = {path: path.stat().st_size for path in sorted(attempt.glob("rank_*.jsonl"))}
    if not sizes:
        raise FileNotFoundError(f"{attempt} has no trace any more")
    read_bytes = list(accumulate(sizes.values()))
    if read_bytes[0] > _MOST_BYTES:
        raise ValueError(
            f"the trace has {read_bytes[0] / 1e6:,.0f} MB, too many to read within a training; run lightning-hpc report"
            f" {attempt}"
        )
    return [
        read_trace(path)
        for (path, size), so_far in zip(sizes.items(), read_bytes, strict=True)
        if size and so_far <= _MOST_BYTES
    ]
