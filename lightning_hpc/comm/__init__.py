"""Gradient communication over slow networks. Imports torch, not Lightning."""

from lightning_hpc.comm.stats import CommStats
from lightning_hpc.comm.topology import Topology

__all__ = ["CommStats", "Topology"]
