"""The process groups of each level of a topology, made in one order on all ranks.

At the innermost level the ranks of a node share the work: each of them owns one *lane*, a shard of every slice. With K
lanes, K independent jobs then run one level further out, each among the owners of one lane; there the same happens
again, until one level is left. Nodes of different size have as many lanes as the smallest of them; the surplus ranks
hand all their data to the lanes' owners and take no part further out.
"""

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_hpc.comm.topology import Domain, Topology, innermost


@dataclass(frozen=True)
class GroupPlan:
    """One set of ranks that work together at one level.

    Attributes:
        height: 0 for the innermost level.
        ranks: Global ranks, ascending; the first `lanes` of them own a lane each.
        lanes: Number of shards, or 0 at the outermost level, where each rank holds the same shard.
    """

    height: int
    ranks: tuple[int, ...]
    lanes: int


@dataclass(frozen=True)
class Level:
    """One level as seen by one of its ranks.

    What is under way at once has process groups of its own, since collectives of one group must be issued in the same
    order everywhere.

    Attributes:
        height: 0 within a node, 1 between nodes, 2 between groups of nodes, ….
        ranks: Global ranks that work together, ascending.
        index: This rank's place among them.
        lanes: Number of shards, or 0 at the outermost level.
        up: Group of the reduce-scatter.
        down: Group of the all-gather.
        agree: At the outermost level, the group of what the ranks agree on before a slice crosses it.
    """

    height: int
    ranks: tuple[int, ...]
    index: int
    lanes: int
    up: dist.ProcessGroup
    down: dist.ProcessGroup
    agree: dist.ProcessGroup | None = None

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All of its groups."""
        return [group for group in (self.up, self.down, self.agree) if group is not None]

    @property
    def name(self) -> str:
        """Name in statistics and errors: ``"intra_node"``, ``"inter_node"``, ``"level_2"``, …."""
        return level_name(self.height)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def __str__(self) -> str:
        return f"level {self.name!r} on rank {self.ranks[self.index]} of ranks {list(self.ranks)}"


def level_name(height: int) -> str:
    """Name of the level at a height."""
    return ("intra_node", "inter_node")[height] if height < 2 else f"level_{height}"


def plan_groups(topology: Topology) -> Iterator[GroupPlan]:
    """Yields every set of ranks of every level, in the order in which all ranks must make their groups."""
    yield from _plan(topology.domains, 0)


def make_levels(topology: Topology, *, timeout: timedelta | None = None) -> list[Level]:
    """Makes the process groups of all levels. A collective: every rank of the job calls it with the same topology.

    Args:
        topology: The ranks of the whole job.
        timeout: How long one collective may take, or None for the backend's default.

    Returns:
        The levels in which this rank takes part, innermost first; levels where it is alone are left out.
    """
    rank = dist.get_rank()
    levels = []
    for plan in plan_groups(topology):
        if len(plan.ranks) == 1:
            continue
        uses = ("up", "down") if plan.lanes else ("up", "down", "agree")
        name = level_name(plan.height)
        groups = [dist.new_group(plan.ranks, timeout=timeout, group_desc=f"hpc:{name}:{use}") for use in uses]
        if rank in plan.ranks:
            levels.append(Level(plan.height, plan.ranks, plan.ranks.index(rank), plan.lanes, *groups))
    return levels


def count_leaves(topology: Topology) -> tuple[int, int]:
    """Number of lanes over all levels but the outermost, and number of ranks that work together there."""
    lanes, outermost = {}, 1
    for plan in plan_groups(topology):
        if plan.lanes:
            lanes[plan.height] = plan.lanes
        else:
            outermost = len(plan.ranks)
    return math.prod(lanes.values()), outermost


def destroy_levels(levels: list[Level]) -> None:
    """Gives the groups of `make_levels` back."""
    for level in levels:
        for group in level.groups:
            dist.destroy_process_group(group)


def keep_levels_for_ever(levels: list[Level]) -> None:
    """Keeps groups whose collectives will not finish from being destructed, which would wait for them.

    gloo's destructor joins its workers, and so would hold up the end of a process whose peers are gone until the
    time-out. A reference in Python is given up when the interpreter ends; one that nobody owns is not.
    """
    for level in levels:
        for group in level.groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _plan(domains: Domain, height: int) -> Iterator[GroupPlan]:
    if isinstance(domains[0], int):
        yield GroupPlan(height, tuple(sorted(domains)), lanes=0)
        return
    nodes = list(innermost(domains))
    lanes = min(len(node) for node in nodes)
    for node in nodes:
        yield GroupPlan(height, tuple(sorted(node)), lanes)
    for lane in range(lanes):
        yield from _plan(_owners(domains, lane), height + 1)


def _owners(domain: Domain, lane: int) -> Any:
    """The tree one level flatter: the owner of ``lane`` in place of each domain of ranks."""
    if isinstance(domain[0], int):
        return sorted(domain)[lane]
    return tuple(_owners(item, lane) for item in domain)
