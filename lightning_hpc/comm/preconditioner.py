"""Makes numbers alike in size before a codec packs them, by what their sums usually are."""

import torch
from torch import Tensor

from lightning_hpc.comm.error_feedback import ErrorFeedback
from lightning_hpc.comm.layout import Run

_FLOOR = 0.02  # of the block's largest: what was never seen before must not outweigh all others when it comes
_DECAY = 15 / 16  # its complement is a power of two, so that a fused multiplication and addition gives the same bits
_TINY = torch.finfo(torch.float32).tiny


class Preconditioner:
    """The usual magnitude of each number's sum over all nodes, and the scales that follow from it.

    A codec's error is about the same for all numbers of a block, so it drowns the small ones, yet Adam divides each by
    its usual magnitude and heeds them all alike. Divided by its scale before it is packed, every number has the same
    relative error. All nodes receive the same sums, so all know the scales without a byte sent.

    A scale is between 1 and 50 and counts within its block only, whose numbers are of one parameter and have received
    as many sums: so neither do the means need a correction for their start at zero, nor does a number overflow. A block
    of which no sum was received has scales of 1.

    Args:
        block: Numbers that the codec packs together.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self._magnitudes = ErrorFeedback()  # which keeps a tensor for each part; these are no residuals

    def scale(self, run: Run, device: torch.device) -> Tensor:
        """What to divide a run's numbers by before they are packed, and to multiply them by when they are unpacked.

        Args:
            run: What this rank brings to the outermost level.
            device: Where its values are.

        Returns:
            A fresh flat fp32 tensor.
        """
        blocks = self._magnitudes.residual(run, device).view(-1, self._block)
        floor = blocks.amax(1, keepdim=True).mul_(_FLOOR).clamp_(min=_TINY)
        return (blocks / floor).clamp_(min=1.0).view(-1)

    def update(self, run: Run, sums: Tensor, unless: Tensor | None = None) -> None:
        """Takes what all nodes have received.

        Args:
            run: What this rank brings to the outermost level.
            sums: The sums of its numbers, fp32.
            unless: A boolean scalar: whether all stays as it is instead.
        """
        former = self._magnitudes.residual(run, sums.device)
        mean = former.mul_(_DECAY) if unless is None else former * _DECAY
        self._magnitudes.keep(run, mean.add_(sums.abs(), alpha=1 - _DECAY), unless)

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of each part's means on the CPU; a key is ``<first element>:<parameter>``."""
        return self._magnitudes.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores what `state_dict` gave."""
        self._magnitudes.load_state_dict(state)
