"""What all exchanges with a codec have in common: who can be packed, and what is kept for the next step."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hpc.comm.codecs.codec import Codec
from lightning_hpc.comm.error_feedback import ErrorFeedback
from lightning_hpc.comm.exchanges.exact import ExactExchange
from lightning_hpc.comm.exchanges.exchange import Exchange
from lightning_hpc.comm.groups import Level
from lightning_hpc.comm.layout import Run
from lightning_hpc.comm.slices import Slice
from lightning_hpc.comm.stats import CommStats

NON_FINITE, DENSE = -2, -1
"""What a rank may say instead of the size of its packet; the smaller one wins."""

_REASONS = {NON_FINITE: "non_finite", DENSE: "dense"}


@dataclass(frozen=True)
class FeedbackSettings:
    """What is done with what codecs lose.

    Attributes:
        is_used: Whether it is added to the next step's values.
        spares_idle: Whether it is kept back for parameters that get no gradient in a pass. Such a parameter may be
            unused on all ranks, and then DistributedDataParallel throws away what is delivered for it. To look for
            them costs a pass over the gradients.
    """

    is_used: bool = True
    spares_idle: bool = False


class CodecExchange(Exchange):
    """Packs values, and adds what was lost to the next step's.

    Where some rank has a NaN or inf, or finds its values too dense, all ranks send the slice uncompressed, and what is
    kept stays as it is (pytorch#55031, #49374): so a GradScaler sees what it would see under DDP.

    Args:
        codec: Packs the values.
        exact: Takes the slices that cannot be packed.
        feedback: What is done with what the codec loses.
        level: See `Exchange`.
        stats: See `Exchange`.
    """

    def __init__(
        self, codec: Codec, exact: ExactExchange, *, feedback: FeedbackSettings, level: Level | None, stats: CommStats
    ) -> None:
        super().__init__(level, stats)
        self.name = codec.name
        self._exact = exact
        self._feedback = ErrorFeedback() if feedback.is_used else None
        self._spares_idle = feedback.is_used and feedback.spares_idle

    @override
    def agree(self, item: Slice) -> Tensor | None:
        values = item.values
        return torch.where(self._is_finite(values), 0, NON_FINITE) if values.numel() else None

    @override
    def agreed(self, item: Slice, words: Tensor) -> None:
        if words.device.type == "cuda":
            self._take_word(item, (words == NON_FINITE).any())
        elif (worst := int(words.min())) < 0:
            item.exchange = self._exact
            self._stats.fallbacks[_REASONS[worst]] += 1
            if worst == NON_FINITE:
                return
        if item.flush:
            item.exchange = self._exact
            self._give_back(item)

    def _is_finite(self, values: Tensor) -> Tensor:
        # A sum is finite unless a value is not, or the sum overflows, and then the values are better sent as they are.
        return values.sum(dtype=torch.float32).isfinite()

    def _take_word(self, item: Slice, refused: Tensor) -> bool:
        """Notes whether some rank refuses to pack the slice; returns that, or False where the host does not know."""
        if refused.device.type == "cuda":
            # The host must not wait for the device to choose another path, so the whole slice becomes NaN.
            item.poisoned = refused
            return False
        item.refused = bool(refused)
        if item.refused:
            self._stats.fallbacks[_REASONS[NON_FINITE]] += 1
        return item.refused

    def _give_back(self, item: Slice) -> None:
        """Adds to the values what was kept, before they are sent as they are."""
        if self._feedback is not None:
            self._release(item, self._feedback, item.plan.run)

    def _release(self, item: Slice, feedback: ErrorFeedback, run: Run) -> None:
        residual = feedback.residual(run, item.values.device)
        place = item.buffer[run.start : run.stop]
        stays = _either(item.poisoned, self._idle(place, run))
        if stays is None:
            place.add_(residual)
            residual.zero_()
        else:
            place.add_(residual.masked_fill(stays, 0.0))
            residual.mul_(stays)

    def _idle(self, values: Tensor, run: Run) -> Tensor | None:
        """For each number, whether all of its parameter's part are zero; None if nobody needs to know."""
        if not self._spares_idle:
            return None
        idle = torch.zeros_like(values, dtype=torch.bool)
        for part in run.parts:
            place = slice(part.offset - run.start, part.offset - run.start + part.numel)
            idle[place] = ~values[place].any()
        return idle

    def _corrected(
        self, values: Tensor, feedback: ErrorFeedback | None, run: Run, poisoned: Tensor | None, idle: Tensor | None
    ) -> Tensor:
        """A fresh fp32 tensor."""
        corrected = values.to(torch.float32, copy=True)
        if feedback is not None:
            residual = feedback.residual(run, values.device)
            corrected.add_(residual if idle is None else residual.masked_fill(idle, 0.0))
        return corrected if poisoned is None else corrected.masked_fill_(poisoned, 0.0)

    def _lost(
        self, corrected: Tensor, decoded: Tensor, feedback: ErrorFeedback, run: Run, idle: Tensor | None
    ) -> Tensor:
        """What is to be kept; overwrites ``corrected``."""
        lost = corrected.sub_(decoded)
        return lost if idle is None else torch.where(idle, feedback.residual(run, lost.device), lost)

    def _deliver(self, values: Tensor, item: Slice) -> None:
        item.values.copy_(values if item.poisoned is None else torch.where(item.poisoned, torch.nan, values))


def _either(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Where one of two conditions holds; None where there is none."""
    if one is None or other is None:
        return other if one is None else one
    return one | other
