"""`StragglerMonitor`: says during the run which rank the others wait for, by what, and what that costs."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray
from typing_extensions import override

from lightning_hpc.callbacks.step_trace import StepTrace
from lightning_hpc.comm.background_gather import BackgroundGather
from lightning_hpc.trace.step_table import WARM_UP_STEPS
from lightning_hpc.trace.step_windows import WINDOW_COLUMNS, table_of_windows
from lightning_hpc.trace.straggler_watch import StragglerWatch
from lightning_hpc.trace.stragglers import LEAST_STEPS, Straggler, find_stragglers

_LEAST_INTERVAL = LEAST_STEPS + WARM_UP_STEPS
# At the end of a fit the ranks are together, unless one is gone.
_LAST_WAIT_S = 1.0
_Analysis = tuple[tuple[Straggler, ...], int, float]


class StragglerMonitor(Callback):
    """Names ranks that the others wait for, with the cause, while the training runs. The ones that wait are not blamed.

    Every ``interval`` iterations the ranks send each other the times of `StepTrace`'s phases, 88 bytes an iteration and
    rank, in the background; no step waits for that. Rank 0 judges them as `lightning_hpc.trace.diagnose` does, without
    the first iterations of a fit, and says once when a straggler appears, when its cost changes, and when it is gone,
    in a log line and in an event named ``straggler`` in its trace file. At each exchange the Trainer's loggers get:

    ============================= =====================================================================================
    ``straggler/lost_share``      Part of the time that stragglers cost, 0 to 1.
    ``straggler/rank``            The most costly one. Missing if there is none.
    ``straggler/excess_ms``       Milliseconds a step that it does more than the others. Missing if there is none.
    ============================= =====================================================================================

    With one rank it does nothing.

    Args:
        interval: Iterations between exchanges.

    Raises:
        ValueError: If ``interval`` is less than 33, too few to tell ranks apart; at set-up, if the Trainer has no
            `StepTrace`.
    """

    def __init__(self, interval: int = 100) -> None:
        super().__init__()
        if interval < _LEAST_INTERVAL:
            raise ValueError(f"interval={interval} is too short to tell ranks apart; give {_LEAST_INTERVAL} or more")
        self._interval = interval
        self._trainer: pl.Trainer | None = None
        self._gather: BackgroundGather | None = None
        self._judge: ThreadPoolExecutor | None = None
        self._rows: list[Sequence[float | None]] = []
        self._windows: NDArray[np.float64] | None = None
        self._found: tuple[Straggler, ...] | None = None
        self._analysis: Future[_Analysis] | None = None
        self._reset()

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """Those of the last exchange, the most costly first; the same on all ranks that have received it."""
        if self._found is None and self._windows is not None:
            self._found = _analyse(self._windows)[0]
        return self._found or ()

    @property
    def lost_seconds(self) -> float:
        """What stragglers have cost in this fit so far. On rank 0; 0 elsewhere."""
        return sum(self._watch.lost_ms.values()) / 1e3

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and StepTrace.find(trainer) is None:
            raise ValueError(
                "StragglerMonitor reads the times of StepTrace, which the Trainer does not have; give"
                " Trainer(callbacks=[StepTrace(), StragglerMonitor()])"
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()  # of a fit that ended without telling
        self._reset()
        if trainer.world_size < 2 or not dist.is_initialized():
            return
        if not dist.is_gloo_available():
            rank_zero_warn("StragglerMonitor is off: this PyTorch was built without gloo")
            return
        self._trainer = trainer
        self._gather = BackgroundGather()
        if trainer.is_global_zero:
            self._judge = ThreadPoolExecutor(max_workers=1, thread_name_prefix="straggler_monitor")
        step_trace = StepTrace.find(trainer)
        assert step_trace is not None
        step_trace.listen(self._add)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._gather is None:
            return
        self._receive_last()
        self._close()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    def _reset(self) -> None:
        self._count = 0
        self._is_waiting = False
        self._rows = []
        self._windows = self._found = self._analysis = None
        self._watch = StragglerWatch()

    def _close(self) -> None:
        if self._gather is None:
            return
        if self._gather.failure is not None:
            rank_zero_info(f"StragglerMonitor has stopped to compare ranks: {self._gather.failure}")
        self._gather.close()
        self._gather = self._trainer = None
        if self._judge is not None:
            self._judge.shutdown()
            self._judge = None
        if self._watch.steps:
            rank_zero_info(f"StragglerMonitor: {self._watch.summary()}")

    def _add(self, times: Sequence[float | None]) -> None:
        """Takes an iteration from `StepTrace`: values in the order of `WINDOW_COLUMNS`."""
        if self._gather is None:
            return
        self._count += 1
        if self._count > WARM_UP_STEPS:
            self._rows.append(times)
        if self._is_waiting:
            self._receive()
        if self._count % self._interval == 0:
            self._send()

    def _send(self) -> None:
        assert self._gather is not None
        # One shape for all, though the first window is shorter by the warm-up.
        window = np.full((self._interval, len(WINDOW_COLUMNS)), np.nan)
        window[: len(self._rows)] = np.array(self._rows, dtype=np.float64)  # None becomes NaN
        self._rows = []
        self._gather.start(window)
        self._is_waiting = True

    def _receive(self) -> None:
        assert self._gather is not None
        if self._analysis is None:
            windows = self._gather.take()
            if windows is not None:
                self._windows, self._found = windows, None
                self._analysis = self._judge.submit(_analyse, windows) if self._judge is not None else None
        elif self._analysis.done():
            self._report(self._analysis.result())
            self._analysis = None
        self._is_waiting = self._gather.pending > 0 or self._analysis is not None

    def _receive_last(self) -> None:
        assert self._gather is not None
        if self._analysis is not None:
            self._report(self._analysis.result())
        while (windows := self._gather.take(_LAST_WAIT_S)) is not None:
            self._windows, self._found = windows, None
            if self._judge is not None:
                self._report(_analyse(windows))

    def _report(self, analysis: _Analysis) -> None:
        assert self._trainer is not None
        self._found, steps, total_ms = analysis
        for news in self._watch.update(self._found, steps, total_ms):
            rank_zero_info(f"StragglerMonitor: {news}")
            self._write_event({"change": news.change, **dataclasses.asdict(news.straggler)})
        metrics = {"straggler/lost_share": sum(each.share for each in self._found)}
        if self._found:
            worst = self._found[0]
            metrics["straggler/rank"] = worst.rank
            metrics["straggler/excess_ms"] = worst.own_ms - worst.others_ms
        for logger in self._trainer.loggers:
            logger.log_metrics(metrics, step=self._trainer.global_step)

    def _write_event(self, details: dict[str, Any]) -> None:
        assert self._trainer is not None
        step_trace = StepTrace.find(self._trainer)
        assert step_trace is not None
        step_trace.write_event("straggler", details)


def _analyse(windows: NDArray[np.float64]) -> _Analysis:
    """Stragglers, iterations, and the milliseconds that these took."""
    table = table_of_windows(windows)
    return find_stragglers(table), table.steps, float(table.times["total"].mean(axis=0).sum())
