"""Lightning callbacks."""

from lightning_hpc.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_hpc.callbacks.allocator_pool import AllocatorPool
from lightning_hpc.callbacks.memory_monitor import MemoryMonitor
from lightning_hpc.callbacks.micro_batch_finder import MicroBatchFinder
from lightning_hpc.callbacks.out_of_memory_recovery import OutOfMemoryRecovery
from lightning_hpc.callbacks.performance_report import PerformanceReport
from lightning_hpc.callbacks.profiler_window import ProfilerWindow
from lightning_hpc.callbacks.step_trace import StepTrace
from lightning_hpc.callbacks.straggler_monitor import StragglerMonitor

__all__ = [
    "ActivationCheckpointing",
    "AllocatorPool",
    "MemoryMonitor",
    "MicroBatchFinder",
    "OutOfMemoryRecovery",
    "PerformanceReport",
    "ProfilerWindow",
    "StepTrace",
    "StragglerMonitor",
]
