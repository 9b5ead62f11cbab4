"""`StepTrace`: one record for each training iteration of each rank that says where its time went."""

import os
import platform
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

import lightning_hpc
from lightning_hpc.callbacks.clock_offset import measure_clock_offset
from lightning_hpc.callbacks.idle_hooks import call_all_hooks, skip_idle_hooks
from lightning_hpc.callbacks.step_recorder import StepRecorder, StepTimes, is_timed_by_marks
from lightning_hpc.precision.memory_aware import MemoryAwarePrecision
from lightning_hpc.trace.records import header_line
from lightning_hpc.trace.writer import TraceWriter

# In automatic optimization the strategy's backward is announced.
_HOOKS_OF_MANUAL_BACKWARD = ("on_before_backward", "on_after_backward")
# A number of an attempt is sent as 64 bits; a directory with a longer one is not ours.
_MOST_DIGITS = 18


class StepTrace(Callback):
    """Writes one record an iteration and rank to ``<dirpath>/attempt_000/rank_00000.jsonl``.

    An iteration is one batch. Durations are in milliseconds, and the phases add up to ``total_ms``:

    ==================== ==============================================================================================
    ``data_prep_ms``     Wait for the batch.
    ``h2d_ms``           Transfer of the batch to the device, with the hooks on its way.
    ``schedule_ms``      Lightning and callbacks, this one included.
    ``forward_ms``       Training step; with manual optimization, what of it is none of the others.
    ``backward_ms``      Backward, without the communication that is exposed.
    ``comm_ms``          Exposed communication: backward has finished, gradients are not reduced yet. Null if several
                         ranks run a strategy that does not measure it, as ``"ddp"``.
    ``optimizer_ms``     Optimizer step, gradient clipping, zeroing of gradients.
    ``unattributed_ms``  The rest, which may be negative: total minus phases.
    ``total_ms``         The iteration, from its fetch to the fetch of the next one, without the spans that lie in it.
    ``start_ms``         When it began, since the file's start.
    ``optimizer_steps``  Optimizer steps in it: 0 while gradients accumulate.
    ``samples``          Length of the batch's first tensor. Null where its first entry is no tensor.
    ``comm_bytes``       Bytes sent in it. Null as above.
    ``step``             ``trainer.global_step`` after it; beside ``batch``, ``epoch``, ``rank``.
    ==================== ==============================================================================================

    Start-up, the start of an epoch's loader, validation, the writing of checkpoints and loggers, and what passes
    between epochs are records of type ``span`` (see `lightning_hpc.trace.timeline.Span`); what ``compression="auto"``
    decides is one of type ``decision``. The first line of a file is a header. A run that is started or resumed gets
    the next attempt, the same on all ranks, so nothing is ever overwritten. Read the files with
    `lightning_hpc.trace.read_traces`.

    The Trainer's loggers get the means of every ``log_every_n_steps`` iterations of rank 0, as ``step_trace/total_ms``
    and so on, with ``step_trace/samples_per_second`` of this rank.

    On CUDA, where the host only launches work, phases and total are the device's (``"clock": "cuda"`` in the header):
    what it spent on a phase, or in it waiting for the host. They come from events that are read later; nothing waits
    for the device. Elsewhere, and for spans and ``start_ms``, times are the host's (``"clock": "host"``).

    Args:
        dirpath: A local directory. None means ``step_trace`` in the directory of the first logger, or in the Trainer's
            ``default_root_dir``.
        console: Whether rank 0 prints the means of every ``log_every_n_steps`` iterations as
            ``data_prep=12.4ms schedule=3.2ms compute=58.1ms comm=8.7ms``, compute being forward, backward and
            optimizer.

    Attributes:
        path: This rank's file of the current or last fit; None before the first.

    Raises:
        TypeError: At set-up, if the Trainer is one of ``pytorch_lightning``.
        ValueError: At set-up, if the directory is not local, or if the Trainer has two of these callbacks.
        OSError: At set-up, if the file cannot be made.
    """

    def __init__(self, dirpath: str | Path | None = None, console: bool = True) -> None:
        super().__init__()
        self._dirpath = dirpath
        self._console = console
        self._recorder: StepRecorder | None = None
        self.path: Path | None = None

    @staticmethod
    def find(trainer: pl.Trainer) -> "StepTrace | None":
        """The Trainer's own, if it has one."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        return next((callback for callback in callbacks if isinstance(callback, StepTrace)), None)

    def listen(self, listener: Callable[[StepTimes], None]) -> None:
        """Has ``listener`` called with the times of each iteration, up to the end of the fit.

        Args:
            listener: Its time counts as ``schedule`` of the next iteration.

        Raises:
            RuntimeError: Outside a fit.
        """
        if self._recorder is None:
            raise RuntimeError("StepTrace records nothing now; call listen from on_fit_start or on_train_start")
        self._recorder.listeners.append(listener)

    def finish(self) -> None:
        """Ends the recording of this fit, if there is one, so that its file is complete."""
        self._close()

    def directory_of(self, trainer: pl.Trainer) -> Path:
        """The absolute directory in which attempts lie. To be asked for by all ranks.

        Raises:
            ValueError: If it is not local.
        """
        # `log_dir` is a collective.
        dirpath = self._dirpath or f"{trainer.log_dir or trainer.default_root_dir}/step_trace"
        if "://" in str(dirpath):
            raise ValueError(f"{dirpath!r} is not a local directory; give StepTrace(dirpath=…) one")
        return Path(dirpath).absolute()

    def write_memory(self, figures: Mapping[str, float | None]) -> None:
        """Appends a record of type ``memory``. Does nothing outside a fit.

        Args:
            figures: By name, of `lightning_hpc.trace.records.MEMORY_FIGURES`.
        """
        if self._recorder is not None:
            self._recorder.write_memory(figures)

    def write_event(self, name: str, details: Mapping[str, Any]) -> None:
        """Appends a record of type ``event``. Does nothing outside a fit.

        Args:
            name: What has happened.
            details: More about it, in types that JSON has.
        """
        if self._recorder is not None:
            self._recorder.write_event(name, details)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        _require_lightning_trainer(trainer)
        if stage != "fit":
            return
        if sum(isinstance(callback, StepTrace) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("the Trainer has more than one StepTrace in its callbacks; leave one of them")
        self._close()  # of a fit that ended without telling
        dirpath = self.directory_of(trainer)
        attempt = _agree_on_attempt(trainer, dirpath)
        directory = dirpath / f"attempt_{attempt:03d}"
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"rank_{trainer.global_rank:05d}.jsonl"
        header, since_ns = _make_header(trainer, attempt)
        writer = TraceWriter(self.path, header)
        console = self._console and trainer.is_global_zero
        self._recorder = StepRecorder(trainer, writer, console, f"[Callback]{self.state_key}.", since_ns)
        backward_hooks = () if pl_module.automatic_optimization else _HOOKS_OF_MANUAL_BACKWARD
        if isinstance(trainer.precision_plugin, MemoryAwarePrecision):
            trainer.precision_plugin.listen(lambda switch: self.write_event("precision_switch", asdict(switch)))
        skip_idle_hooks(self, StepTrace, used=("on_train_batch_end", *backward_hooks))

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._recorder is not None
        self._recorder.start_training()

    # `manual_backward` announces no action.
    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self._recorder is not None:
            self._recorder.start_backward()

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recorder is not None:
            self._recorder.stop_backward()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._recorder is not None
        self._recorder.finish_batch(batch, batch_idx)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
            call_all_hooks(self)


def _require_lightning_trainer(trainer: object) -> None:
    if any(base.__module__.partition(".")[0] == "pytorch_lightning" for base in type(trainer).__mro__):
        raise TypeError(
            f"StepTrace is a callback of lightning.pytorch, but the Trainer is a {type(trainer).__module__}"
            f".{type(trainer).__qualname__}: pytorch_lightning and lightning.pytorch are different packages with the"
            " same classes, which do not mix; import Trainer from lightning.pytorch"
        )


def _agree_on_attempt(trainer: pl.Trainer, dirpath: Path) -> int:
    """The number of the first attempt that is free on all ranks, which may see different disks."""
    numbers = [path.name.removeprefix("attempt_") for path in dirpath.glob("attempt_*")]
    free = max((int(each) + 1 for each in numbers if each.isdecimal() and len(each) < _MOST_DIGITS), default=0)
    # No rank makes its directory before all ranks have looked: the reduction waits for them.
    mine = torch.tensor(free, device=trainer.strategy.root_device)
    return int(trainer.strategy.reduce(mine, reduce_op="max"))


def _make_header(trainer: pl.Trainer, attempt: int) -> tuple[bytes, int]:
    """The header, and when its ``started_at`` was read, as `time.perf_counter_ns` says."""
    device = trainer.strategy.root_device
    group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    offset = measure_clock_offset(group, device)
    started_at, since_ns = time.time(), time.perf_counter_ns()
    header = header_line(
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        attempt=attempt,
        host=socket.gethostname(),
        pid=os.getpid(),
        started_at=started_at,
        clock_offset_ms=None if offset is None else offset.offset_ms,
        clock_uncertainty_ms=None if offset is None else offset.uncertainty_ms,
        clock="cuda" if is_timed_by_marks(device) else "host",
        device_type=device.type,
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "lightning_hpc": lightning_hpc.__version__,
        },
    )
    return header, since_ns
