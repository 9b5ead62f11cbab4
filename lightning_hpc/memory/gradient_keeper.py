"""`GradientKeeper`: backward that leaves accumulated gradients as they were until it has succeeded."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn


class GradientKeeper:
    """Runs backwards of one training step so that what they add to gradients can be taken away again.

    Gradients of earlier micro-batches are put aside, and added when backward has ended: the sums are bitwise those of
    PyTorch, which adds the same two numbers. Where there are none, nothing is done. The price is memory for one more
    copy of the gradients, from the end of a backward on to the end of the step.

    Args:
        parameters: All that backward may give a gradient to.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._before: list[Tensor | None] | None = None

    def run(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Calls ``backward``. Only the first one of a step has something to put aside: later ones add to its sums."""
        if self._before is not None:
            backward(*args, **kwargs)
            return
        self._before = before = [parameter.grad for parameter in self._parameters]
        if all(gradient is None for gradient in before):
            backward(*args, **kwargs)
            return
        for parameter in self._parameters:
            parameter.grad = None
        backward(*args, **kwargs)
        for parameter, gradient in zip(self._parameters, before, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad

    def restore(self) -> None:
        """Puts the gradients back that there were before the first backward, if one has begun."""
        if self._before is not None:
            for parameter, gradient in zip(self._parameters, self._before, strict=True):
                parameter.grad = gradient
            self._before = None
