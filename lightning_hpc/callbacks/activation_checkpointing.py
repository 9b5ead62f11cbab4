"""`ActivationCheckpointing`: recomputes as many blocks in backward as it takes to fit the memory, and no more."""

import itertools
from collections.abc import Iterator
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_hpc._compiled import is_compiled
from lightning_hpc.callbacks.step_trace import StepTrace
from lightning_hpc.memory.blocks import Blocks, find_blocks
from lightning_hpc.memory.checkpoint_plan import CheckpointPlan
from lightning_hpc.memory.checkpointed_blocks import CheckpointedBlocks
from lightning_hpc.memory.default_probe import default_probe
from lightning_hpc.memory.dry_run import DryRun
from lightning_hpc.memory.nested import tensors_in
from lightning_hpc.memory.probe import PressureProbe
from lightning_hpc.precision.memory_aware import MemoryAwarePrecision
from lightning_hpc.precision.switch import Switch

# The rest is for what the allocator cannot use, and for batches that are larger than the measured one.
_SHARE_OF_LIMIT = 0.9


class ActivationCheckpointing(Callback):
    """Chooses the blocks whose recomputation costs the least time while the saved activations fit a budget.

    Training starts with all blocks checkpointed. The first batch after the first optimizer step is measured: what each
    block saves, what it needs when it is recomputed, how long that takes. From the next batch on only the chosen blocks
    are checkpointed. The rank that is furthest above its budget chooses for all. Losses, gradients, random numbers and
    checkpoint files are those of a run without this callback.

    Compiled models are left alone with a warning: the compiler plans what is saved.

    Args:
        budget: The most bytes that autograd may have saved at one time: a number of bytes; or a float, as part of what
            is saved without checkpointing; or ``"auto"``: what the device has, less what else is in use and a tenth.
        blocks: Names of modules of the LightningModule, or names of their classes. None means repeated blocks: see
            `lightning_hpc.memory.find_blocks`.

    Attributes:
        plan: What was chosen; None before that.

    Raises:
        ValueError: If ``budget`` is none of these; at the start, if ``blocks`` does not fit the model, or if the device
            has no memory probe and the budget is ``"auto"``.
    """

    def __init__(self, budget: Literal["auto"] | int | float = "auto", blocks: list[str] | None = None) -> None:
        super().__init__()
        _require_budget(budget)
        self._budget = budget
        self._wanted = blocks
        self._blocks: CheckpointedBlocks | None = None
        self._dry_run: DryRun | None = None
        self._probe: PressureProbe | None = None
        self._first_step = 0
        self._is_outdated = self._keeps_all = False
        self.plan: CheckpointPlan | None = None

    def measure_again(self) -> None:
        """Has the next batch measured and the blocks chosen anew, as a change of precision asks for.

        Call it between batches, on all ranks.
        """
        self._abandon()
        if self._blocks is not None:
            self._blocks.checkpoint(self._blocks.names)
            self.plan = None

    def checkpoint_all(self) -> bool:
        """Checkpoints all blocks until the end of the fit, as memory that has run out asks for.

        Returns:
            Whether that changes anything.
        """
        if self._blocks is None or self._keeps_all:
            return False
        self._abandon()
        self._keeps_all = True
        changes = set(self._blocks.checkpointed) != set(self._blocks.names)
        self._blocks.checkpoint(self._blocks.names)
        return changes

    @property
    def checkpointed(self) -> list[str]:
        """Names of the blocks that are recomputed now."""
        return [] if self._blocks is None else self._blocks.checkpointed

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()  # of a fit that ended without telling
        self.plan = None
        self._first_step = trainer.global_step
        found = _find(pl_module, self._wanted)
        for name, reason in found.refused.items():
            rank_zero_warn(f"ActivationCheckpointing leaves {name} as it is: {reason}")
        if not (found.modules or found.refused):
            rank_zero_warn(
                "ActivationCheckpointing found no blocks to checkpoint; name some, as in"
                ' ActivationCheckpointing(blocks=["MyBlock"])'
            )
        if not found.modules:
            return
        self._is_outdated = self._keeps_all = False
        if isinstance(trainer.precision_plugin, MemoryAwarePrecision):
            trainer.precision_plugin.listen(self._note_switch)
        self._probe = default_probe(trainer.strategy.root_device) if self._budget == "auto" else None
        self._blocks = CheckpointedBlocks(found.modules)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._keeps_all:
            return
        if self._is_outdated:
            self._is_outdated = False
            self.measure_again()
        # Before the first optimizer step its state is missing from the memory, and times are those of a cold start.
        if self._blocks is None or self.plan is not None or trainer.global_step == self._first_step:
            return
        if self._probe is not None:
            self._probe.read()  # peaks count from here
        self._dry_run = DryRun(self._blocks, _alive_anyway(pl_module, batch)).__enter__()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        dry_run = self._dry_run
        if dry_run is None:
            return
        self._abandon()
        plan = dry_run.choose(self._budget_bytes(dry_run))
        self.plan = _agree(trainer, plan, dry_run.is_complete)
        if self.plan is not None:
            self._apply(trainer, self.plan)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._abandon()  # a measurement whose batch was skipped, which ends the epoch

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()

    def _note_switch(self, switch: Switch) -> None:
        # It comes in the middle of a batch.
        self._is_outdated = True

    def _budget_bytes(self, dry_run: DryRun) -> int:
        if isinstance(self._budget, int):
            return self._budget
        if isinstance(self._budget, float):
            return int(self._budget * dry_run.model().peak_bytes(()))
        assert self._probe is not None
        reading = self._probe.read()
        others = max(reading.used_bytes - dry_run.saved.peak_bytes, 0)
        return max(int(_SHARE_OF_LIMIT * reading.limit_bytes) - others, 0)

    def _apply(self, trainer: pl.Trainer, plan: CheckpointPlan) -> None:
        assert self._blocks is not None
        for name, reason in self._blocks.refused.items():
            rank_zero_warn(f"ActivationCheckpointing leaves {name} as it is: {reason}")
        self._blocks.checkpoint([name for name in plan.blocks if name not in self._blocks.refused])
        rank_zero_info(f"ActivationCheckpointing: {_describe(plan, len(self._blocks.names))}")
        if not plan.fits:
            rank_zero_warn(
                f"ActivationCheckpointing cannot get below {_mebibytes(plan.peak_bytes)} of saved activations; the"
                f" budget is {_mebibytes(plan.budget_bytes)}. In this order, try: smaller blocks; a smaller batch with"
                ' accumulate_grad_batches; precision="bf16-mixed"; a strategy that shards the model, such as "fsdp"'
            )
        step_trace = StepTrace.find(trainer)
        if step_trace is not None:
            step_trace.write_event("activation_checkpointing", {**vars(plan), "blocks": list(plan.blocks)})

    def _abandon(self) -> None:
        if self._dry_run is not None:
            self._dry_run.__exit__(None, None, None)
            self._dry_run = None

    def _stop(self) -> None:
        self._abandon()
        if self._blocks is not None:
            self._blocks.remove()
            self._blocks = None


def _require_budget(budget: object) -> None:
    is_share = isinstance(budget, float) and 0 < budget < 1
    is_count = isinstance(budget, int) and not isinstance(budget, bool) and budget > 0
    if not (budget == "auto" or is_share or is_count):
        raise ValueError(
            f"budget={budget!r} is none; give a number of bytes, a float between 0 and 1 as part of what is saved"
            ' without checkpointing, or "auto"'
        )


def _find(pl_module: pl.LightningModule, wanted: list[str] | None) -> Blocks:
    if is_compiled(pl_module):
        return Blocks(refused={"the model": "it is compiled, and the compiler plans what is saved"})
    return find_blocks(pl_module, wanted)


def _alive_anyway(pl_module: pl.LightningModule, batch: Any) -> Iterator[Tensor]:
    return itertools.chain(pl_module.parameters(), pl_module.buffers(), tensors_in(batch))


def _agree(trainer: pl.Trainer, plan: CheckpointPlan, is_complete: bool) -> CheckpointPlan | None:
    """The plan of the rank that is furthest above its budget; None if a rank has measured nothing."""
    mine = torch.tensor([plan.plain_peak_bytes - plan.budget_bytes, is_complete], device=trainer.strategy.root_device)
    everyones = trainer.strategy.all_gather(mine).reshape(-1, 2)
    chooser = int(everyones[:, 0].argmax())
    agreed: CheckpointPlan = trainer.strategy.broadcast(plan, src=chooser)
    return agreed if bool(everyones[:, 1].all()) else None


def _describe(plan: CheckpointPlan, count: int) -> str:
    saved = f"{_mebibytes(plan.plain_peak_bytes)} of saved activations"
    if not plan.blocks:
        return f"no block is recomputed: {saved} fit the budget of {_mebibytes(plan.budget_bytes)}"
    return (
        f"{len(plan.blocks)} of {count} blocks are recomputed ({', '.join(plan.blocks)}): {saved} become"
        f" {_mebibytes(plan.peak_bytes)} (budget {_mebibytes(plan.budget_bytes)}), for about"
        f" {plan.extra_seconds * 1000:.1f} ms more a step"
    )


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.{1 if count >= 2**20 else 4}f} MiB"
