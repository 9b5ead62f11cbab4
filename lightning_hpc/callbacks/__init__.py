"""Lightning callbacks."""

from lightning_hpc.callbacks.step_trace import StepTrace

__all__ = ["StepTrace"]
