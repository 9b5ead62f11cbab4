"""Strategies for `lightning.pytorch.Trainer`."""

from lightning_hpc.strategies.hpc import HPCStrategy

__all__ = ["HPCStrategy"]
