"""`SavedTensor`: a tensor in the keeping of autograd, for hooks that pass it through."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SavedTensor:
    """Keeps a tensor for backward as autograd does when no hook is set.

    Args:
        tensor: What the hook for packing is given.
    """

    def __init__(self, tensor: Tensor) -> None:
        # With its graph, an output that is saved by its own node would never be freed.
        self._tensor = tensor.detach() if tensor.requires_grad else tensor
        self._version = tensor._version

    def unpack(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: If it has been changed in place, as PyTorch does by itself where no hook is set.
        """
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._tensor.shape)} that is needed for backward was changed in place after"
                " it was saved; use the operation that returns a new tensor"
            )
        return self._tensor


def outer_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """The hooks for saved tensors that are in force, which a further pair would hide, or what stands for none."""
    # Private: there is no public way to chain hooks.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return (SavedTensor, SavedTensor.unpack) if hooks is None else hooks
