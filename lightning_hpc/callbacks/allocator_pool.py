"""`AllocatorPool`: the CUDA allocator's pool, sized by the first steps and then reserved."""

import warnings
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_hpc.callbacks.idle_hooks import call_all_hooks, skip_idle_hooks
from lightning_hpc.callbacks.step_trace import StepTrace
from lightning_hpc.memory.cuda_pool import (
    CudaPool,
    use_expandable_segments,
    why_not_expandable,
    why_not_in_one_piece,
)


class AllocatorPool(Callback):
    """Takes what a training needs of a CUDA device once and for all, so that later steps find it in one piece.

    At the start of a fit it switches expandable segments on, unless something stands against them (see
    docs/allocator.md). The first ``warm_up_steps`` optimizer steps are the dry run: their peak, with ``headroom``, is
    what the pool then gets, in one piece. So a device that is too full says so at the start and not after hours, and
    another process cannot take the memory in between. Each rank sizes its own pool. Every fit, resumed ones too, does
    so once. On other devices than CUDA it does nothing.

    Args:
        warm_up_steps: Optimizer steps that show what is needed; the first makes the optimizer's state.
        headroom: Part of their peak that is added, for batches that are longer.
        expandable_segments: Whether to switch them on. ``"auto"``: unless something stands against them.

    Attributes:
        reserved_bytes: What this rank's pool has since it was reserved; None before, and where it was not.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self, warm_up_steps: int = 2, headroom: float = 0.1, expandable_segments: bool | Literal["auto"] = "auto"
    ) -> None:
        super().__init__()
        if warm_up_steps < 1:
            raise ValueError(f"warm_up_steps={warm_up_steps} shows nothing; give 1 or more")
        if not 0 <= headroom < 10:
            raise ValueError(f"headroom={headroom} is no part of the peak; give 0 or more, such as 0.1")
        if expandable_segments not in (True, False, "auto"):
            raise ValueError(f"expandable_segments={expandable_segments!r} is not True, False or 'auto'")
        self._warm_up_steps = warm_up_steps
        self._headroom = headroom
        self._expandable = expandable_segments
        self._pool: CudaPool | None = None
        self._first_step = 0
        self.reserved_bytes: int | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Before the module is moved to the device: what is allocated already stays where it is.
        if stage != "fit" or trainer.strategy.root_device.type != "cuda" or self._expandable is False:
            return
        reason = why_not_expandable()
        if reason is None:
            use_expandable_segments()
        elif self._expandable is True:
            rank_zero_warn(f"AllocatorPool: no expandable segments, since {reason}")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.reserved_bytes = None
        self._pool = None
        if trainer.strategy.root_device.type == "cuda":
            reason = why_not_in_one_piece()
            if reason is None:
                self._pool = CudaPool(trainer.strategy.root_device)
                self._pool.peak_bytes()  # from here on
                self._first_step = trainer.global_step
            else:
                rank_zero_warn(f"AllocatorPool reserves nothing, since {reason}")
        skip_idle_hooks(self, AllocatorPool, used=() if self._pool is None else ("on_train_batch_end",))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._pool is None or trainer.global_step - self._first_step < self._warm_up_steps:
            return
        pool, self._pool = self._pool, None
        skip_idle_hooks(self, AllocatorPool, used=())
        peak = pool.peak_bytes()
        wanted = int(peak * (1 + self._headroom))
        try:
            self.reserved_bytes = pool.reserve(wanted)
        except torch.OutOfMemoryError as error:
            warnings.warn(
                f"AllocatorPool of rank {trainer.global_rank}: the first steps took up to {_gibibytes(peak)}, and the"
                f" device does not have {self._headroom:.0%} more in one piece, so the pool grows as it needs: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        rank_zero_info(
            f"AllocatorPool: {_gibibytes(self.reserved_bytes)} are reserved; the first steps took up to"
            f" {_gibibytes(peak)}"
        )
        step_trace = StepTrace.find(trainer)
        if step_trace is not None:
            step_trace.write_event("allocator_pool", {"peak_bytes": peak, "reserved_bytes": self.reserved_bytes})

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._pool = None
        call_all_hooks(self)


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
