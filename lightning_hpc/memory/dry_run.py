"""`DryRun`: one real step with all blocks checkpointed, from which the peak of any other choice follows."""

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType

from torch import Tensor
from typing_extensions import Self

from lightning_hpc.memory.call_record import CallRecord
from lightning_hpc.memory.checkpoint_plan import CheckpointPlan, choose_blocks
from lightning_hpc.memory.checkpointed_blocks import CheckpointedBlocks
from lightning_hpc.memory.peak_model import PeakModel
from lightning_hpc.memory.saved_activations import SavedActivations


class DryRun:
    """Measures the step that runs while the context is entered; it changes no result of it.

    Forward shows what each block would save, the recomputation shows what it brings back, and both show how long it
    takes. The step needs as much memory as one with all blocks checkpointed.

    Args:
        blocks: The blocks, all of them checkpointed.
        alive_anyway: Tensors that do not count: parameters, buffers, the batch.

    Attributes:
        saved: What the step saved.
    """

    def __init__(self, blocks: CheckpointedBlocks, alive_anyway: Iterable[Tensor]) -> None:
        self.saved = SavedActivations(alive_anyway)
        self._blocks = blocks
        self._names = blocks.names
        self._records: list[CallRecord] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        assert self._blocks.checkpointed == self._names
        self._records = self._stack.enter_context(self._blocks.watched_by(self.saved))
        self._stack.enter_context(self.saved)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def is_complete(self) -> bool:
        """Whether backward came through a block at all."""
        return any(record.is_recomputed for record in self._records)

    def model(self) -> PeakModel:
        """What other choices would need."""
        return PeakModel(self.saved.holdings, self._names)

    def seconds(self) -> list[float]:
        """Time to recompute each block, with all its calls; waits for the device."""
        return [
            sum(record.seconds() for record in self._records if record.block == name and record.is_recomputed)
            for name in self._names
        ]

    def choose(self, budget_bytes: int) -> CheckpointPlan:
        """The cheapest choice that fits a budget: see `choose_blocks`."""
        return choose_blocks(self.model(), self.seconds(), budget_bytes)
