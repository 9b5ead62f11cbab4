"""Precision plugins."""

from lightning_hpc.precision.memory_aware import MemoryAwarePrecision
from lightning_hpc.precision.precision_map import PrecisionMap
from lightning_hpc.precision.switch import Switch
from lightning_hpc.precision.units import find_units

__all__ = ["MemoryAwarePrecision", "PrecisionMap", "Switch", "find_units"]
