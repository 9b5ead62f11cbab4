"""Finds the launcher that has started this process as one of several ranks."""

import os

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from typing_extensions import override


class VariablesEnvironment(TorchElasticEnvironment):
    """Ranks that somebody started with torch's variables, without torchrun."""

    @staticmethod
    @override
    def detect() -> bool:
        return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()

    @override
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))


def find_launcher() -> ClusterEnvironment | None:
    """The launcher's environment, or None where this process was started alone."""
    for kind in (TorchElasticEnvironment, VariablesEnvironment, SLURMEnvironment):
        if kind.detect():
            return kind()
    return None


def ranks_per_node(environment: ClusterEnvironment) -> int:
    """How many ranks the launcher has put on each node; all of them where it does not say.

    Raises:
        ValueError: If nodes differ in it, which Lightning's Trainer cannot do.
    """
    size = environment.world_size()
    name = "SLURM_NTASKS_PER_NODE" if isinstance(environment, SLURMEnvironment) else "LOCAL_WORLD_SIZE"
    local = int(os.environ.get(name, size))
    if size % local:
        raise ValueError(f"{name}={local} of {size} ranks: a Trainer needs the same number of ranks on each node")
    return local
