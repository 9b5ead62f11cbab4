"""Weights in low precision that are cast again in backward, where autocast keeps a copy of each from forward on."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_hpc.memory.saved_tensor import outer_hooks


class _WeightCast(NamedTuple):
    """Stands for a cast of a parameter."""

    parameter: nn.Parameter
    dtype: torch.dtype
    is_transposed: bool
    version: int

    def unpack(self) -> Tensor:
        if self.parameter._version != self.version:  # the cast in forward was one of other values
            raise RuntimeError(
                f"a parameter of shape {tuple(self.parameter.shape)} was changed in place between a forward and its"
                " backward; run backward before the optimizer steps"
            )
        cast = self.parameter.detach().to(self.dtype)
        return cast.t() if self.is_transposed else cast


def recast_weights(dtype: torch.dtype) -> saved_tensors_hooks:
    """Makes a context in which autograd keeps no casts of trained parameters to ``dtype``, but casts them again.

    Autocast's casts stay for as long as the operators that have used them wait for backward: two bytes a
    parameter, which is a good part of what a model with short batches saves. Gradients are bitwise the same. Other
    tensors go where the hooks that are set outside put them. Casts of frozen parameters are kept: nothing in them tells
    what they were made from.
    """
    pack_outside, unpack_outside = outer_hooks()

    def pack(tensor: Tensor) -> object:
        cast = _find_cast(tensor, dtype)
        return pack_outside(tensor) if cast is None else cast

    def unpack(packed: object) -> Tensor:
        return packed.unpack() if isinstance(packed, _WeightCast) else unpack_outside(packed)

    return saved_tensors_hooks(pack, unpack)


def _find_cast(tensor: Tensor, dtype: torch.dtype) -> _WeightCast | None:
    if tensor.dtype is not dtype or tensor.grad_fn is None:
        return None
    # What the graph says of the tensor: a parameter, cast, and transposed perhaps, as a linear layer does it.
    node = tensor.grad_fn
    is_transposed = node.name() == "TBackward0"
    before = node.next_functions[0][0] if is_transposed else node
    if before is None or before.name() != "ToCopyBackward0":
        return None
    leaf = before.next_functions[0][0]
    parameter = getattr(leaf, "variable", None)
    if not isinstance(parameter, nn.Parameter):
        return None
    return _WeightCast(parameter, dtype, is_transposed, parameter._version)
