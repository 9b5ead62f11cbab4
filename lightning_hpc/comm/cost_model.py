"""Predicts what a step takes with each way of reducing gradients, from measured or given speeds.

The model walks the slices of all buckets through the same stages as `HierarchicalAllReduce`: a stage handles one slice
at a time, in order; both hops over the outermost level share its link. What a node's ranks send outwards shares the
node's link, what they send each other within the node does not.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_hpc.comm.groups import plan_groups
from lightning_hpc.comm.link_speed import LinkSpeed
from lightning_hpc.comm.topology import Domain, Topology

_STAGE_SECONDS = 2e-4  # of the host, for a slice at a stage: wake a thread, start a collective (measured with gloo)
# Share of the link's rate that the two hops of a codec reach: both directions are full, and a hop ends with its slower
# one. (Measured with int8, int4 and int3 at 50 Mbit/s: 0.83, 0.85, 0.82 of what the rate alone would give.)
_HOPS_EFFICIENCY = 0.85
_DDP_BUCKET_NUMEL = 25 * 2**18  # DistributedDataParallel's own default, beside which ours are small


@dataclass(frozen=True)
class Workload:
    """The computation that communication runs beside.

    Attributes:
        ready: For each bucket in its order, the seconds from the start of the step until its gradients are computed,
            and their number.
        tail_seconds: From the last reduced gradient to the end of the step: the optimizer, above all.
        observed: What reduced the gradients while these times were observed, ``"none"`` or a codec; empty if they were
            not.
        step_seconds: How long the whole step took then.
    """

    ready: tuple[tuple[float, int], ...]
    tail_seconds: float
    observed: str = ""
    step_seconds: float = 0.0

    @classmethod
    def uniform(
        cls, *, numel: int, forward_seconds: float, backward_seconds: float, tail_seconds: float, bucket_numel: int
    ) -> "Workload":
        """Gradients that come out of backward at a constant rate."""
        buckets = max(math.ceil(numel / bucket_numel), 1)
        sizes = [(index + 1) * numel // buckets - index * numel // buckets for index in range(buckets)]
        times = [forward_seconds + backward_seconds * (index + 1) / buckets for index in range(buckets)]
        return cls(tuple(zip(times, sizes, strict=True)), tail_seconds)

    @property
    def numel(self) -> int:
        """Number of gradients."""
        return sum(numel for _, numel in self.ready)

    @property
    def compute_seconds(self) -> float:
        """A step without communication."""
        return self.ready[-1][0] + self.tail_seconds


@dataclass(frozen=True)
class CodecCost:
    """What a codec costs for each number.

    Attributes:
        name: The codec; ``"none"`` sends fp32.
        scattered_bytes: Bytes of a packed number in hops whose traffic is (N-1)/N of the packed values; both hops of a
            block codec or a sum together, so 8 bytes for fp32.
        gathered_bytes: Bytes of a packed number that is sent to all N-1 other nodes.
        pack_seconds: Host or device time for a number to be encoded, and for what is lost to be kept.
        unpack_seconds: Time for a number to be decoded, for one packet.
        agrees: Whether the ranks agree before each slice.
    """

    name: str = "none"
    scattered_bytes: float = 8.0
    gathered_bytes: float = 0.0
    pack_seconds: float = 0.0
    unpack_seconds: float = 0.0
    agrees: bool = False


@dataclass(frozen=True)
class Prediction:
    """What the model says of one choice.

    Attributes:
        name: The codec, or ``"none"``, or ``"ddp"`` for the flat ring.
        step_seconds: Duration of a step.
        exposed_seconds: What of it waits for communication.
        bytes_per_node: Payload that the busiest node sends outwards.
    """

    name: str
    step_seconds: float
    exposed_seconds: float
    bytes_per_node: float


def predict_choices(
    workload: Workload, topology: Topology, costs: Sequence[CodecCost], slice_numel: int
) -> list[Prediction]:
    """Plain DDP in its own buckets, and the hierarchy with each codec.

    Where steps were observed, the hierarchy is not expected to be faster than it was then, but for what the codecs
    compute: if they waited for the host, which several ranks may share, so will others. Observe the lightest codec.

    Args:
        workload: The computation, in the buckets of the hierarchy.
        topology: As for `predict`.
        costs: Of all codecs, the observed one and ``"none"`` among them.
        slice_numel: Numbers in a slice.
    """
    host = {cost.name: workload.numel * sum(_codec_seconds(topology, cost)) for cost in costs}
    predictions = [predict_ddp(_in_ddp_buckets(workload), topology)]
    for cost in costs:
        prediction = predict(workload, topology, cost, slice_numel)
        floor = workload.step_seconds + host[cost.name] - host[workload.observed] if workload.observed else 0.0
        step = max(prediction.step_seconds, floor)
        predictions.append(replace(prediction, step_seconds=step, exposed_seconds=step - workload.compute_seconds))
    return predictions


def predict_ddp(workload: Workload, topology: Topology) -> Prediction:
    """The flat ring in the order of ranks, one bucket after the other (plain DDP)."""
    size = topology.world_size
    crossings = _ring_crossings(topology)
    latency = max((topology.links[height].latency_seconds for height in crossings), default=0.0)
    # All links carry the same bytes at once, so the one that takes longest sets the pace.
    seconds_per_byte = max(
        (count / topology.links[height].bytes_per_second for height, count in crossings.items()), default=0.0
    )
    free = 0.0
    sent = 0.0
    for ready, numel in workload.ready:
        passed_on = 2 * (size - 1) / size * 4 * numel
        sent += passed_on * crossings.get(topology.depth - 1, 0)
        free = max(free, ready) + 2 * (size - 1) * latency + passed_on * seconds_per_byte
    return _prediction("ddp", workload, free, sent)


def predict(workload: Workload, topology: Topology, cost: CodecCost, slice_numel: int) -> Prediction:
    """The hierarchy, with or without a codec on its outermost level.

    Args:
        workload: The computation.
        topology: With the speed of each level in its `links`, and more than one level.
        cost: The codec's cost.
        slice_numel: Numbers in a slice.
    """
    stages = _stages(topology, cost)
    free = [0.0] * len(stages)
    sent = 0.0
    for ready, numel in workload.ready:
        count = max(round(numel / slice_numel), 1)
        for _ in range(count):
            now = ready
            for index, (seconds, seconds_per_number) in enumerate(stages):
                now = free[index] = max(now, free[index]) + seconds + seconds_per_number * numel / count
        sent += _crossing_bytes(topology, cost) * numel
    return _prediction(cost.name, workload, max(free, default=0.0), sent)


def _prediction(name: str, workload: Workload, reduced: float, sent: float) -> Prediction:
    computed = workload.ready[-1][0]
    end = max(reduced, computed)
    return Prediction(name, end + workload.tail_seconds, end - computed, sent)


def _stages(topology: Topology, cost: CodecCost) -> list[tuple[float, float]]:
    """Seconds of each stage for a slice, and for each of its numbers."""
    inner: list[tuple[float, float]] = []
    held = 1.0  # what a rank holds of a slice
    for height, (lanes, size) in enumerate(_inner_levels(topology)):
        link = topology.links[height]
        # Within a node each rank has its own way; further out, all lanes of a domain share its link.
        moved = (size - 1) / size * 4 * (held if height == 0 else 1.0)
        inner.append((link.latency_seconds + _STAGE_SECONDS, moved / link.bytes_per_second))
        held /= lanes
    outermost = topology.links[-1]
    rate = outermost.bytes_per_second * (_HOPS_EFFICIENCY if cost.agrees else 1.0)
    crossing = (2 * outermost.latency_seconds + _STAGE_SECONDS, _crossing_bytes(topology, cost) / rate)
    pack, unpack = ((_STAGE_SECONDS, seconds) for seconds in _codec_seconds(topology, cost))
    agree = [(outermost.latency_seconds + _STAGE_SECONDS, 0.0)] if cost.agrees else []
    return [*inner, *agree, pack, crossing, unpack, *reversed(inner)]


def _codec_seconds(topology: Topology, cost: CodecCost) -> tuple[float, float]:
    """What a rank packs and unpacks, for each number of the model."""
    held = 1 / math.prod(lanes for lanes, _ in _inner_levels(topology))
    packets = len(topology.domains) if cost.gathered_bytes else 2
    return held * cost.pack_seconds, held * cost.unpack_seconds * packets


def _crossing_bytes(topology: Topology, cost: CodecCost) -> float:
    """Payload that one domain of the outermost level sends for each number of the model."""
    nodes = len(topology.domains)
    return (nodes - 1) / nodes * cost.scattered_bytes + (nodes - 1) * cost.gathered_bytes


def _in_ddp_buckets(workload: Workload) -> Workload:
    """The same gradients in the buckets of plain DDP: a small one first, then large ones."""
    merged: list[tuple[float, int]] = []
    for at, numel in workload.ready:
        if len(merged) > 1 and merged[-1][1] < _DDP_BUCKET_NUMEL:
            merged[-1] = (at, merged[-1][1] + numel)
        else:
            merged.append((at, numel))
    return replace(workload, ready=tuple(merged))


def _inner_levels(topology: Topology) -> list[tuple[int, int]]:
    """Lanes and largest group of each level but the outermost."""
    levels: dict[int, tuple[int, int]] = {}
    for plan in plan_groups(topology):
        if plan.lanes:
            size = max(len(plan.ranks), levels.get(plan.height, (0, 0))[1])
            levels[plan.height] = (plan.lanes, size)
    return [levels[height] for height in sorted(levels)]


def _ring_crossings(topology: Topology) -> dict[int, int]:
    """For each height at which ranks hand on to others, how many of them share the link of its busiest domain."""
    paths = dict(_paths(topology.domains))
    size = topology.world_size
    shared: Counter[tuple[int, ...]] = Counter()
    for rank in range(size):
        here, there = paths[rank], paths[(rank + 1) % size]
        if here != there:
            apart = next(index for index, pair in enumerate(zip(here, there, strict=True)) if pair[0] != pair[1])
            shared[here[: apart + 1]] += 1
    crossings: dict[int, int] = {}
    for domain, count in shared.items():
        height = topology.depth - len(domain)
        crossings[height] = max(count, crossings.get(height, 0))
    return crossings


def _paths(domain: Domain, path: tuple[int, ...] = ()) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Each rank with its place in each domain that it is in, outermost first."""
    for index, item in enumerate(domain):
        if isinstance(item, int):
            yield item, (*path, index)
        else:
            yield from _paths(item, (*path, index))


def _ranks(domain: object) -> Sequence[int]:
    if isinstance(domain, int):
        return [domain]
    assert isinstance(domain, tuple)
    return [rank for item in domain for rank in _ranks(item)]


def scale_nodes(topology: Topology, nodes: int) -> Topology:
    """The same kind of node, another number of them: for "what if" questions.

    Args:
        topology: Two levels; its first domain is the model of all nodes.
        nodes: Number of nodes, at least 1.
    """
    size = len(_ranks(topology.domains[0]))
    lists = [list(range(node * size, (node + 1) * size)) for node in range(nodes)]
    links: tuple[LinkSpeed, ...] = topology.links if nodes > 1 else topology.links[:1]
    return Topology.from_lists(lists, links) if nodes > 1 else Topology.from_lists(lists[0], links)
