"""What the units of a model save for backward, measured once."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lightning_hpc.precision.precision_map import PrecisionMap
from lightning_hpc.precision.unit_bytes import UnitBytes
from lightning_hpc.precision.units import find_units


@contextmanager
def measured_units(model: nn.Module) -> Iterator[dict[str, UnitBytes]]:
    """Measures the forwards that run while the context is entered, in the precision that they have.

    Returns:
        What each unit saves (see `find_units`), filled in when the context is left.
    """
    found: dict[str, UnitBytes] = {}
    precision_map = PrecisionMap(find_units(model).modules, "cpu", torch.bfloat16)  # none of them is switched
    try:
        with precision_map.measured() as meter:
            yield found
    finally:
        precision_map.remove()
        for name, saved in meter.saved.items():
            found[name] = UnitBytes(saved, saved - meter.saved_float32[name] // 2, meter.inputs[name])
