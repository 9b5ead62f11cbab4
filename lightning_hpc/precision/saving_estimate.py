"""`SavingEstimate`: what the usual remedies would save, computed for the model at hand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from lightning_hpc.memory.nested import tensors_in
from lightning_hpc.precision.unit_bytes import UnitBytes


@dataclass(frozen=True)
class SavingEstimate:
    """Bytes of the things that can be made smaller.

    Attributes:
        activations: What forward saves for backward now.
        low_precision: What mixed precision would still take off that.
        checkpointing: What recomputing all blocks would take off it.
        states: Parameters, gradients and optimizer state.
    """

    activations: int
    low_precision: int
    checkpointing: int
    states: int

    @classmethod
    def of(
        cls,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        units: Mapping[str, UnitBytes],
        low: Sequence[str],
        blocks: Sequence[str],
    ) -> "SavingEstimate":
        """Estimates from what was measured.

        Args:
            module: The model.
            optimizers: Its optimizers.
            units: What each unit saves.
            low: Units that are in low precision now.
            blocks: Those that could be recomputed, and are not.
        """
        now = {name: unit.low if name in low else unit.plain for name, unit in units.items()}
        # A block keeps its input, and one block at a time has everything back.
        kept = sum(min(4 * units[name].inputs, now[name]) for name in blocks if name in now)
        recomputed = [now[name] for name in blocks if name in now]
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        weights = sum(parameter.nbytes for parameter in module.parameters())
        gradients = sum(parameter.nbytes for parameter in parameters)
        # Before the first step there is no state yet; AdamW would make two numbers a parameter.
        state = sum(each.nbytes for optimizer in optimizers for each in tensors_in(list(optimizer.state.values())))
        return cls(
            activations=sum(now.values()),
            low_precision=sum(unit.saving for name, unit in units.items() if name not in low),
            checkpointing=max(sum(recomputed) - kept - max(recomputed, default=0), 0),
            states=weights + gradients + (state or 2 * gradients),
        )

    def advice(self) -> str:
        """The remedies in the order in which to try them, each with what it would save."""
        half = _bytes(self.activations // 2)
        return "\n".join(
            (
                "In this order, try:",
                f"  1. a smaller batch: half of it saves about {half} of activations",
                f"  2. mixed precision (MemoryAwarePrecision, or precision='bf16-mixed'): {_bytes(self.low_precision)}",
                f"  3. accumulate_grad_batches=2 with half the batch: {half}, and the same effective batch",
                f"  4. ActivationCheckpointing: up to {_bytes(self.checkpointing)}",
                f"  5. a strategy that shards the model, such as 'fsdp': over 8 devices {_bytes(self.states * 7 // 8)}",
            )
        )


def _bytes(count: int) -> str:
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:,.1f} MiB"
