"""How full a device's memory is, and what may be done about it. Imports torch, but not Lightning."""

from lightning_hpc.memory.blocks import Blocks, find_blocks
from lightning_hpc.memory.budget_probe import BudgetProbe
from lightning_hpc.memory.callable_probe import CallableProbe
from lightning_hpc.memory.checkpoint_plan import CheckpointPlan
from lightning_hpc.memory.checkpointed_blocks import CheckpointedBlocks
from lightning_hpc.memory.cuda_probe import CudaProbe
from lightning_hpc.memory.default_probe import default_probe
from lightning_hpc.memory.dry_run import DryRun
from lightning_hpc.memory.host_probe import HostProbe
from lightning_hpc.memory.probe import PressureProbe
from lightning_hpc.memory.reading import MemoryReading
from lightning_hpc.memory.saved_activations import SavedActivations

__all__ = [
    "Blocks",
    "BudgetProbe",
    "CallableProbe",
    "CheckpointPlan",
    "CheckpointedBlocks",
    "CudaProbe",
    "DryRun",
    "HostProbe",
    "MemoryReading",
    "PressureProbe",
    "SavedActivations",
    "default_probe",
    "find_blocks",
]
