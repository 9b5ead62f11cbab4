"""`OptimizerGuard`: whether an optimizer step that failed has changed anything."""

from torch import Tensor
from torch.optim import Optimizer


class OptimizerGuard:
    """Notes an optimizer's parameters and state just before it steps.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._without_state = [parameter for parameter in parameters if not optimizer.state.get(parameter)]
        states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
        self._versions = [(tensor, tensor._version) for tensor in (*parameters, *states)]

    @property
    def is_intact(self) -> bool:
        """Whether no parameter and no state that there was has been written to."""
        return all(tensor._version == version for tensor, version in self._versions)

    def restore(self) -> None:
        """Drops state that the step has begun to make."""
        assert self.is_intact
        for parameter in self._without_state:
            self._optimizer.state.pop(parameter, None)
