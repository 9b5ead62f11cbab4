"""What stands in the place of forward: on units, and on modules in them that stay in float32."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_hpc.memory.nested import flatten, tensors_in, unflatten
from lightning_hpc.memory.replaced_forward import ReplacedForward
from lightning_hpc.precision.unit_meter import UnitMeter
from lightning_hpc.precision.weight_casts import recast_weights


class UnitForward(ReplacedForward):
    """Runs a unit's forward under autocast where the unit is low, and returns float32 in any case.

    Args:
        name: The unit's name.
        unit: The unit.
        device_type: Of `torch.autocast`.
        dtype: The low precision.

    Attributes:
        is_low: Whether the unit is in low precision.
        meter: What counts the bytes that forward saves, if anything does.
    """

    def __init__(self, name: str, unit: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        super().__init__(unit)
        self.is_low = False
        self.meter: UnitMeter | None = None
        self._name = name
        self._device_type = device_type
        self._dtype = dtype

    @override
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = self._own_forward(module)
        if not self.is_low and self.meter is None:
            return forward(*args, **kwargs)
        if self.meter is not None and torch.is_grad_enabled() and not _is_in_backward():
            with self.meter.unit(self._name, tensors_in((args, kwargs))):
                return self._run(forward, args, kwargs)
        return self._run(forward, args, kwargs)

    @override
    def remove(self) -> None:
        self.is_low = False  # a copy of the unit, or what has replaced `forward` since, may still call this
        super().remove()

    def _run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.is_low:
            return forward(*args, **kwargs)
        with torch.autocast(self._device_type, self._dtype):
            if torch.is_grad_enabled():
                with recast_weights(self._dtype):
                    outputs = forward(*args, **kwargs)
            else:
                outputs = forward(*args, **kwargs)
        return _convert(outputs, self._dtype, torch.float32)


class Float32Forward(ReplacedForward):
    """Runs the forward of a module in a unit in float32, whatever the unit's precision is.

    Args:
        module: The module.
        unit: The forward of the unit that it is in.
        device_type: Of `torch.autocast`.
        dtype: The low precision.
    """

    def __init__(self, module: nn.Module, unit: UnitForward, device_type: str, dtype: torch.dtype) -> None:
        super().__init__(module)
        self._unit = unit
        self._device_type = device_type
        self._dtype = dtype

    @override
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = self._own_forward(module)
        if not self._unit.is_low:
            return forward(*args, **kwargs)
        args, kwargs = _convert((args, kwargs), self._dtype, torch.float32)
        with torch.autocast(self._device_type, enabled=False):
            return forward(*args, **kwargs)


def _is_in_backward() -> bool:
    # Private, but nothing else tells a recomputation from a forward: it would count twice.
    return torch._C._current_graph_task_id() != -1


def _convert(value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """Tensors of one dtype in another one; a tensor on its own is the common case."""
    if isinstance(value, Tensor):
        return value.to(target) if value.dtype is source else value
    leaves, structure = flatten(value)
    converted = [_convert(leaf, source, target) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return unflatten(converted, structure)
