"""Nested domains from the figures of pairs: ranks are near each other where the numbers leave a gap.

The *cost* of a pair is the time one slice of gradients takes between the two, latency included. Merging the cheapest
pairs first (single linkage) gives the costs at which domains grow together; where these costs jump by `GAP`, a level
ends. Noise only ever makes a pair look slower than it is, so single linkage errs to one side: one good path is enough.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from lightning_hpc.comm.topology import Topology

Pair: TypeAlias = tuple[int, int]
"""Two ranks, the lower first."""

Partition: TypeAlias = tuple[tuple[int, ...], ...]
"""Every rank once; each domain ascending, domains by their first rank."""

GAP = 4.0
"""A level ends where the next cheapest link costs this many times more.

Loopback and links of 50 to 1000 Mbit/s are 40 to 1000 times apart, cores and NUMA nodes of one host less than 2 times,
and two measurements of one link that are off by 30 % in opposite directions 1.9 times."""

SLOW = 5.0
"""A link this many times slower than the median of its level is worth a warning: more than noise, less than the factor
of 10 and more that a wrong interface costs."""


@dataclass(frozen=True)
class SlowRanks:
    """A domain that reaches its peers far slower than those reach each other.

    Attributes:
        ranks: The ranks of the domain.
        height: Level of the link, 0 for the innermost.
        cost: Seconds a slice takes on the domain's best link.
        usual_cost: The same for the median domain of the level.
    """

    ranks: tuple[int, ...]
    height: int
    cost: float
    usual_cost: float


def group_ranks(costs: Mapping[Pair, float], hosts: Sequence[int]) -> Topology:
    """Groups ranks into nested domains by the gaps between the costs of their links.

    Where a domain of several hosts faces lone hosts only, as one node with a bad link faces all others, the gap is a
    fault and no level.

    Args:
        costs: Seconds of one slice for each measured pair; the pairs connect all ranks.
        hosts: For each rank a number that ranks with shared memory have in common.
    """
    levels = partitions(costs, len(hosts))
    kept = [levels[0]]
    for partition in levels[1:-1]:
        if not _only_lone_ranks_stand_apart(partition, kept[-1], hosts):
            kept.append(partition)
    domains = {block[0]: block for block in (kept[1] if len(kept) > 1 else levels[-1])}
    nested: dict[int, tuple[object, ...]] = dict(domains)
    for partition in [*kept[2:], levels[-1]] if len(kept) > 1 else []:
        nested = {block[0]: tuple(nested[rank] for rank in block if rank in nested) for block in partition}
    return Topology(nested[0])


def partitions(costs: Mapping[Pair, float], world_size: int) -> list[Partition]:
    """The partition at every gap, from single ranks to all ranks in one domain."""
    merges = cheapest_merges(costs, world_size)
    parent = list(range(world_size))
    found = [_blocks(parent)]
    for index, (cost, pair) in enumerate(merges):
        if index and cost >= GAP * merges[index - 1][0]:
            found.append(_blocks(parent))
        _join(parent, pair)
    if world_size > 1:
        found.append(_blocks(parent))
    assert len(found[-1]) == 1, f"the measured pairs leave {found[-1]} unconnected"
    return found


def cheapest_merges(costs: Mapping[Pair, float], world_size: int) -> list[tuple[float, Pair]]:
    """The edges of the minimum spanning tree, cheapest first."""
    parent = list(range(world_size))
    return [(cost, pair) for cost, pair in sorted((cost, pair) for pair, cost in costs.items()) if _join(parent, pair)]


def slow_ranks(costs: Mapping[Pair, float], topology: Topology) -> list[SlowRanks]:
    """The domains of each level whose best link is `SLOW` times slower than that of the median domain."""
    found = []
    for height, siblings in _families(topology):
        best = {}
        for unit in siblings:
            others = {rank for other in siblings if other is not unit for rank in other}
            crossing = [cost for (a, b), cost in costs.items() if (a in unit) != (b in unit) and {a, b} & others]
            if crossing:
                best[unit] = min(crossing)
        if len(best) < 3:
            continue  # of two, either may be the usual one
        usual = median(best.values())
        found += [SlowRanks(unit, height, cost, usual) for unit, cost in best.items() if cost >= SLOW * usual]
    return found


def height_of(topology: Topology, pair: Pair) -> int:
    """The level at which two ranks meet: 0 within a node."""
    domain, height = topology.domains, topology.depth - 1
    while height:
        inner = [item for item in domain if set(pair) <= set(flatten(item))]
        if not inner:
            break
        domain, height = inner[0], height - 1
    return height


def all_domains(topology: Topology) -> list[tuple[int, ...]]:
    """The ranks of every domain of every level, that of all ranks included."""
    return [flatten(topology.domains), *(unit for height, units in _families(topology) if height for unit in units)]


def flatten(domain: object) -> tuple[int, ...]:
    """The ranks of a domain, or the rank itself."""
    if isinstance(domain, int):
        return (domain,)
    assert isinstance(domain, tuple)
    return tuple(rank for item in domain for rank in flatten(item))


def _join(parent: list[int], pair: Pair) -> bool:
    """Puts two ranks' sets together; False if they were one already."""
    low, high = sorted(_root(parent, rank) for rank in pair)
    parent[high] = low
    return low != high


def _root(parent: list[int], rank: int) -> int:
    while parent[rank] != rank:
        rank = parent[rank]
    return rank


def _blocks(parent: list[int]) -> Partition:
    blocks: dict[int, list[int]] = {}
    for rank in range(len(parent)):
        blocks.setdefault(_root(parent, rank), []).append(rank)
    return tuple(tuple(block) for block in blocks.values())


def _only_lone_ranks_stand_apart(partition: Partition, finer: Partition, hosts: Sequence[int]) -> bool:
    """Whether one domain of several hosts has merged and every other one is as it was at the level below."""
    merged = [block for block in partition if block not in finer]
    return len(merged) == 1 and len({hosts[rank] for rank in merged[0]}) > 1


def _families(topology: Topology) -> list[tuple[int, list[tuple[int, ...]]]]:
    """Each set of domains (or ranks) that lie side by side, with the level at which they meet."""
    families = []
    stack = [(topology.domains, topology.depth - 1)]
    while stack:
        domain, height = stack.pop()
        families.append((height, [flatten(item) for item in domain]))
        if height:
            stack += [(item, height - 1) for item in domain]
    return families
