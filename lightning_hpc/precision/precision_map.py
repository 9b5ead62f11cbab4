"""`PrecisionMap`: which units of a model compute in low precision now."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import nn

from lightning_hpc.precision.unit_forward import Float32Forward, UnitForward
from lightning_hpc.precision.unit_meter import UnitMeter


class PrecisionMap:
    """Switches units of a model between float32 and a low precision; parameters and what a unit returns stay float32.

    Only ``forward`` is replaced, on the objects. Change the map between a backward and the next forward, never between
    a forward and its backward: what is recomputed in backward would come out otherwise.

    Args:
        units: The units by name; none may lie in another. All of them are in float32 at first.
        device_type: Where they compute, as `torch.autocast` calls it.
        dtype: `torch.bfloat16` or `torch.float16`.
        keep_float32: Patterns (as in `fnmatch`) of names or classes of modules that compute in float32 in a low unit
            too; the names are those of `unit_parts`.

    Attributes:
        unmatched: Those of the patterns that fit nothing.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        device_type: str,
        dtype: torch.dtype,
        keep_float32: Collection[str] = (),
    ) -> None:
        self._forwards: dict[str, UnitForward] = {}
        self._kept: list[Float32Forward] = []
        self._units = dict(units)
        matched: set[str] = set()
        for name, unit in units.items():
            if fitting := _fitting(name, unit, keep_float32):
                matched |= fitting
                continue
            forward = self._forwards[name] = UnitForward(name, unit, device_type, dtype)
            for path, module in unit.named_modules(prefix=name):
                if fitting := _fitting(path, module, keep_float32):
                    matched |= fitting
                    self._kept.append(Float32Forward(module, forward, device_type, dtype))
        self.unmatched = [pattern for pattern in keep_float32 if pattern not in matched]

    @property
    def names(self) -> list[str]:
        """Of all units that can be low."""
        return list(self._forwards)

    @property
    def low(self) -> list[str]:
        """Names of those that are."""
        return [name for name, forward in self._forwards.items() if forward.is_low]

    def set_low(self, names: Collection[str]) -> None:
        """Puts these units in low precision, and all others in float32."""
        assert set(names) <= self._forwards.keys(), f"{set(names) - self._forwards.keys()} are no units"
        for name, forward in self._forwards.items():
            forward.is_low = name in names
        # A cast from before would be a constant, without a gradient, where the user has autocast on outside.
        torch.clear_autocast_cache()

    @contextmanager
    def measured(self) -> Iterator[UnitMeter]:
        """Counts what the forwards of units save while the context is entered."""
        tensors = (tensor for unit in self._units.values() for tensor in (*unit.parameters(), *unit.buffers()))
        meter = UnitMeter(tensors)
        for forward in self._forwards.values():
            forward.meter = meter
        try:
            yield meter
        finally:
            for forward in self._forwards.values():
                forward.meter = None

    def remove(self) -> None:
        """Gives each module its own ``forward`` back."""
        for forward in (*self._kept, *self._forwards.values()):
            forward.remove()


def _fitting(name: str, module: nn.Module, patterns: Collection[str]) -> set[str]:
    names = {name, type(module).__name__}
    return {pattern for pattern in patterns if any(fnmatchcase(each, pattern) for each in names)}
