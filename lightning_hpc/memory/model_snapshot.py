"""`ModelSnapshot`: what a training step changes in a model beside its parameters, so that the step can be undone."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hpc.memory.block_state import may_change

_kinds: dict[type, str | None] = {list: "container", dict: "container"}


class ModelSnapshot:
    """Buffers and attributes of some modules as they are now; also the states of metrics, which are attributes.

    Tensors are copied, and lists and dicts that an attribute holds, but not what is in them. Other objects that are
    changed in place are not seen.

    Args:
        modules: The modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [_ModuleSnapshot(module) for module in modules]

    def find_changed(self) -> set[nn.Module]:
        """The modules that are otherwise by now, or may be."""
        return {each.module for each in self._modules if each.has_changed() or may_change(each.module)}

    def restore(self) -> None:
        """Puts everything back; tensors are written to, so that whoever holds them sees it."""
        for each in self._modules:
            each.restore()


class _ModuleSnapshot:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._attributes = module.__dict__.copy()
        self._tensors: list[tuple[Tensor, int, Tensor]] = []
        self._containers: list[tuple[Any, Any]] = []
        for value in (*module._buffers.values(), *self._attributes.values()):
            cls = type(value)
            kind = _kinds[cls] if cls in _kinds else _kind(cls)  # in each step, so without a call for what is known
            if kind == "tensor":
                self._tensors.append((value, value._version, value.detach().clone()))
            elif kind == "container":  # among them the dicts of buffers, parameters and modules
                self._containers.append((value, value.copy()))

    def has_changed(self) -> bool:
        return (
            any(tensor._version != version for tensor, version, _ in self._tensors)
            or not _are_same(self._attributes, self.module.__dict__)
            or any(not _are_same_items(container, copy) for container, copy in self._containers)
        )

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, _, copy in self._tensors:
            tensor.copy_(copy)
        for container, copy in self._containers:
            container.clear()
            container.extend(copy) if isinstance(container, list) else container.update(copy)
        # Without `__setattr__`, as nothing has been assigned.
        attributes = self.module.__dict__
        for name in attributes.keys() - self._attributes.keys():
            del attributes[name]
        attributes.update(self._attributes)


def _kind(cls: type) -> str | None:
    """Whether instances are tensors, plain lists or dicts, or neither; remembered, since it is asked so often."""
    if cls not in _kinds:
        _kinds[cls] = "tensor" if issubclass(cls, Tensor) else None
    return _kinds[cls]


def _are_same(before: dict[str, Any], now: dict[str, Any]) -> bool:
    return before.keys() == now.keys() and all(value is now[name] for name, value in before.items())


def _are_same_items(before: Any, now: Any) -> bool:
    if isinstance(before, dict):
        return _are_same(before, now)
    return len(before) == len(now) and all(one is other for one, other in zip(before, now, strict=True))
