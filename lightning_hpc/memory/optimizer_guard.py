"""`OptimizerGuard`: whether an optimizer step that failed has changed anything."""

from torch import Tensor
from torch.optim import Optimizer


class OptimizerGuard:
    """Notes an optimizer's parameters and state before it steps.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._tensors: list[Tensor] = []
        self._without_state: list[Tensor] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._tensors.append(parameter)
                if state := optimizer.state.get(parameter):
                    self._tensors += [value for value in state.values() if isinstance(value, Tensor)]
                else:
                    self._without_state.append(parameter)
        self._versions = [tensor._version for tensor in self._tensors]

    @property
    def is_intact(self) -> bool:
        """Whether no parameter and no state that there was has been written to."""
        return self._versions == [tensor._version for tensor in self._tensors]

    def restore(self) -> None:
        """Drops state that the step has begun to make."""
        assert self.is_intact
        for parameter in self._without_state:
            self._optimizer.state.pop(parameter, None)
