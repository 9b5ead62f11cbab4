"""Tensors in tuples, lists, dicts, named tuples and the like."""

from typing import Any

from torch import Tensor

# Private, but the only one that knows whatever a library has registered, such as model outputs.
from torch.utils import _pytree


def flatten(value: Any) -> tuple[list[Any], Any]:
    """What ``value`` holds, tensors and others, and the structure that `unflatten` needs."""
    return _pytree.tree_flatten(value)


def unflatten(leaves: list[Any], structure: Any) -> Any:
    """A value of this structure."""
    return _pytree.tree_unflatten(leaves, structure)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors that ``value`` holds."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]
