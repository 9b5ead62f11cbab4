"""`MemoryMonitor`: how full the memory is, and how well the allocator gets along, for each rank over the run."""

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_hpc.callbacks.step_trace import StepTrace
from lightning_hpc.memory.figures import MemoryFigures


class MemoryMonitor(Callback):
    """Writes records of each rank's memory into `StepTrace`'s file, if there is one, and rank 0's to the loggers.

    ========================== ======================= =================================================================
    Key in the trace           Key in the loggers      Meaning
    ========================== ======================= =================================================================
    ``memory_used_bytes``      ``memory/used_bytes``   Most bytes in use since the last record. CUDA: tensors. CPU: the
                                                       process, without pages of files.
    ``memory_limit_bytes``     ``memory/limit_bytes``  How many it can have: what it has and what is left to it.
    (used by limit)            ``memory/used_share``   Part of the limit, 0 to 1.
    ``memory_reserved_bytes``  …``/reserved_bytes``    CUDA: held by the caching allocator.
    ``memory_hit_rate``        ``memory/hit_rate``     CUDA: part of the allocations since the last record that it
                                                       served without asking the device, 0 to 1.
    ``memory_fragmentation``   …``/fragmentation``     CUDA: part of the reserved bytes that is free but cannot be given
                                                       back, since the rest of its block is in use, 0 to 1.
    ``memory_retries``         ``memory/retries``      CUDA: times that the device had nothing left and the cache was
                                                       freed, since the start of the fit.
    ``gpu_used_bytes``         ``gpu/used_bytes``      NVML: in use by all processes on the GPU.
    ``gpu_utilization``        ``gpu/utilization``     NVML: part of its last sample period, a second at most, in which
                                                       a kernel ran, 0 to 1.
    ========================== ======================= =================================================================

    What a device does not have is null in the trace and missing in the loggers. Nothing waits for the device. On
    CUDA, reading the peak resets it: `torch.cuda.max_memory_allocated` then counts from the last record, as ``VmHWM``
    of ``/proc/self/status`` does on the CPU; `peak_bytes` is that of the fit.

    There is a record after the first batch, after every ``interval`` batches, and at the end. When a CUDA device runs
    out of memory, there is a last one, and a warning that says what to try.

    Args:
        interval: Batches between records. None means the Trainer's ``log_every_n_steps``.

    Attributes:
        peak_bytes: Most bytes in use in this fit so far; None where unknown.

    Raises:
        ValueError: If ``interval`` is less than 1.
    """

    def __init__(self, interval: int | None = None) -> None:
        super().__init__()
        if interval is not None and interval < 1:
            raise ValueError(f"interval={interval} is no number of batches; give 1 or more, or None")
        self._interval = interval
        self._figures: MemoryFigures | None = None
        self._batches = self._next = self._recorded = 0
        self.peak_bytes: int | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()  # of a fit that ended without telling
        self._figures = MemoryFigures(trainer.strategy.root_device)
        self._batches, self._next, self._recorded = 0, 1, 0
        self.peak_bytes = None

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        if self._batches == self._next:
            interval = self._interval or trainer.log_every_n_steps  # type: ignore[attr-defined]
            # 0 turns the Trainer's logging off.
            self._next = (self._batches // interval + 1) * interval if interval else 0
            self._record(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recorded < self._batches:
            self._record(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, torch.OutOfMemoryError) and self._figures is not None:
            figures = self._record(trainer)
            step_trace = StepTrace.find(trainer)
            if step_trace is not None:
                step_trace.write_event("out_of_memory", figures)
            _warn(trainer.global_rank, figures)
        self._close()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    def _record(self, trainer: pl.Trainer) -> dict[str, float | None]:
        assert self._figures is not None
        self._recorded = self._batches
        figures = self._figures.read()
        used = figures["memory_used_bytes"]
        if used is not None:
            self.peak_bytes = max(int(used), self.peak_bytes or 0)
        step_trace = StepTrace.find(trainer)
        if step_trace is not None:
            step_trace.write_memory(figures)
        if trainer.is_global_zero:
            metrics = _to_metrics(figures)
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)
        return figures

    def _close(self) -> None:
        if self._figures is not None:
            self._figures.close()
            self._figures = None


def _warn(rank: int, figures: dict[str, float | None]) -> None:
    used, limit = (_gibibytes(figures[key]) for key in ("memory_used_bytes", "memory_limit_bytes"))
    warnings.warn(
        f"rank {rank} ran out of memory: it had up to {used} of {limit} in use. In this order, try: a smaller"
        ' batch with accumulate_grad_batches; precision="bf16-mixed"; activation checkpointing; a strategy that'
        ' shards the model, such as "fsdp"',
        RuntimeWarning,
        stacklevel=2,
    )


def _to_metrics(figures: dict[str, float | None]) -> dict[str, float]:
    metrics = {key.replace("_", "/", 1): value for key, value in figures.items() if value is not None}
    if "memory/used_bytes" in metrics:
        metrics["memory/used_share"] = metrics["memory/used_bytes"] / metrics["memory/limit_bytes"]
    return metrics


def _gibibytes(count: float | None) -> str:
    return "an unknown number of GiB" if count is None else f"{count / 2**30:.1f} GiB"
