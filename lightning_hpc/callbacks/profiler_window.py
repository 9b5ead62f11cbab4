"""`ProfilerWindow`: torch's profiler for a few steps, those that were named or those behind a slow one."""

import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch.profiler import ProfilerActivity, profile
from typing_extensions import override

from lightning_hpc.callbacks.step_trace import StepTrace
from lightning_hpc.trace.outlier_watch import FACTOR, OutlierWatch

# Lightning calls every hook of every callback, but skips an attribute that is not callable.
_IDLE_HOOKS = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_optimizer_step"),
    *("on_before_backward", "on_after_backward"),
)


class _Window(NamedTuple):
    profiler: profile
    first_step: int
    reason: str


class ProfilerWindow(Callback):
    """Runs ``torch.profiler`` for a few steps, and writes ``<dirpath>/profile_rank_00000_step_000123.json.gz`` a time.

    Open the files at https://ui.perfetto.dev. The number is the first step of the window; a file of that name is
    replaced. Step ``n`` is what raises ``trainer.global_step`` from ``n - 1`` to ``n``, as in the records of
    `StepTrace`; while gradients accumulate, it has several batches. A window begins where the step before has ended, so
    it has the wait for the batch, too. It ends with the fit at the latest, and is written after an exception as well.

    An outlier is a batch that took more than 3 times the median of up to 128 batches before it. The first of a fit
    are not judged, nor are those in which a validation, a checkpoint or a new epoch lies. Each rank judges its own.

    While no window is open, it costs less than two microseconds a step, and waits for no device. A profiler that is
    running already is left alone, with a warning, and the window is left out.

    Args:
        steps: Steps at which a window begins.
        outliers: Whether an outlier opens a window over the steps that follow.
        length: Steps of a window.
        limit: Most windows of a fit that outliers open, on each rank.
        dirpath: A local directory. None means that of `StepTrace`, or, where there is none, of one without arguments.

    Attributes:
        paths: The files that this rank has written in the current or last fit.

    Raises:
        ValueError: If nothing is to be profiled, or a number is less than 1; at set-up, if the directory is not local.
    """

    def __init__(
        self,
        steps: Sequence[int] = (),
        outliers: bool = False,
        length: int = 3,
        limit: int = 3,
        dirpath: str | Path | None = None,
    ) -> None:
        super().__init__()
        if not steps and not outliers:
            raise ValueError("there is nothing to profile; give steps=[100, 2000], or outliers=True")
        for name, number in (("length", length), ("limit", limit), *(("steps", step) for step in steps)):
            if number < 1:
                raise ValueError(f"{name} has {number}; it must be at least 1, and steps count from 1")
        self._steps = sorted(steps)
        self._outliers = outliers
        self._length = length
        self._limit = limit
        self._dirpath = dirpath
        self._directory = Path()
        self._window: _Window | None = None
        self._to_come: list[int] = []
        self._watch: OutlierWatch | None = None
        self._ended_at: int | None = None
        self._outlier_ns: int | None = None
        self.paths: list[Path] = []
        self._reset(first_step=1)
        for hook in _IDLE_HOOKS:
            # Only a subclass has something to do in them.
            if getattr(type(self), hook) is getattr(Callback, hook):
                self.__dict__[hook] = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if "://" in str(self._dirpath):
            raise ValueError(f"{self._dirpath!r} is not a local directory; give ProfilerWindow(dirpath=…) one")
        if self._dirpath is not None:
            self._directory = Path(self._dirpath).absolute()
        else:
            self._directory = (StepTrace.find(trainer) or StepTrace()).directory_of(trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close(trainer)  # of a fit that ended without telling
        self.paths = []
        self._reset(trainer.global_step + 1)
        self._open_if_named(trainer)

    @property
    def on_train_batch_end(self) -> Callable[..., None] | None:  # type: ignore[override]
        """The hook of a batch after which there is something to do; None after the others.

        Lightning asks for it once a batch, which is when time and batches are counted here. To call a hook takes it
        longer than all of that.
        """
        is_due = self._window is not None
        if self._watch is not None and not is_due:
            before, self._ended_at = self._ended_at, time.perf_counter_ns()
            if before is not None and self._watch.add(self._ended_at - before):
                self._outlier_ns = self._ended_at - before
                is_due = True
        if self._batches_off:
            self._batches_off -= 1
        elif self._to_come:
            is_due = True
        if is_due:
            return self._finish_batch
        # A subclass may call it by `super`.
        return None if type(self) is ProfilerWindow else _do_nothing

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._ended_at = None

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._ended_at = None

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._ended_at = None

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        missed = [step for step in self._to_come if step > trainer.global_step]
        if missed:
            rank_zero_warn(f"ProfilerWindow: the fit ended with step {trainer.global_step}, before steps={missed}")
        self._close(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close(trainer)

    def _finish_batch(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._window is not None:
            if trainer.global_step < self._window.first_step + self._length - 1:
                return
            self._close(trainer)
            # Those that were named within the window.
            self._to_come = [step for step in self._to_come if step > trainer.global_step]
            self._batches_off = 0
        outlier_ns, self._outlier_ns = self._outlier_ns, None
        if outlier_ns is not None:
            self._open_behind_outlier(trainer, outlier_ns)
        if not self._batches_off:
            self._open_if_named(trainer)

    def _reset(self, first_step: int) -> None:
        self._to_come = [step for step in self._steps if step >= first_step]
        self._watch = OutlierWatch() if self._outliers else None
        self._opened_by_outliers = 0
        self._ended_at = self._outlier_ns = None
        self._batches_off = 0

    def _open_if_named(self, trainer: pl.Trainer) -> None:
        next_step = trainer.global_step + 1
        # A batch with several optimizer steps may pass by a number.
        if self._window is None and self._to_come and self._to_come[0] <= next_step:
            self._open(trainer, next_step, f"step {self._to_come[0]} was named")
        while self._to_come and self._to_come[0] <= next_step:
            del self._to_come[0]
        # To ask for `global_step` takes a microsecond. In automatic optimization a batch raises it by one at most.
        is_automatic = trainer.lightning_module.automatic_optimization
        self._batches_off = self._to_come[0] - next_step - 1 if self._to_come and is_automatic else 0

    def _open_behind_outlier(self, trainer: pl.Trainer, duration_ns: int) -> None:
        step = trainer.global_step
        self._opened_by_outliers += 1
        if self._opened_by_outliers == self._limit:
            self._watch = None
        self._open(trainer, step + 1, f"{duration_ns / 1e6:.3g} ms at step {step}, over {FACTOR:g} times the median")

    def _open(self, trainer: pl.Trainer, first_step: int, reason: str) -> None:
        if _is_profiling():
            _warn(f"leaves out the window at step {first_step} ({reason}): another profiler is running")
            return
        activities = [ProfilerActivity.CPU]
        if trainer.strategy.root_device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities)
        try:
            profiler.start()
        except RuntimeError as error:
            _warn(f"leaves out the window at step {first_step} ({reason}): {error}")
            return
        self._window = _Window(profiler, first_step, reason)

    def _close(self, trainer: pl.Trainer) -> None:
        if self._window is None:
            return
        (profiler, first_step, reason), self._window = self._window, None
        self._ended_at = None
        if not _is_profiling():
            # Torch would crash on an attempt to write what is not there.
            _warn(f"has lost the window at step {first_step}: another profiler was started in it, and took its events")
            return
        path = self._directory / f"profile_rank_{trainer.global_rank:05d}_step_{first_step:06d}.json.gz"
        try:
            profiler.stop()
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            # The training is worth more than its profile.
            _warn(f"has lost the window at step {first_step}: {error}")
            return
        self.paths.append(path)
        step_trace = StepTrace.find(trainer)
        if step_trace is not None:
            step_trace.write_event("profile", {"file": path.name, "first_step": first_step, "reason": reason})


def _is_profiling() -> bool:
    # Private: torch lets a second profiler start, which then takes the events of the first.
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def _do_nothing(*args: Any) -> None:
    pass


def _warn(message: str) -> None:
    warnings.warn(f"ProfilerWindow {message}", RuntimeWarning, stacklevel=3)
