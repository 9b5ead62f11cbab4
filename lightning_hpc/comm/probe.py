"""Measures a job's topology with messages between its ranks.

Rank 0 leads: it decides which pairs to test (see `survey`), tells both ranks of a pair, and awaits their figures; the
other ranks wait for its word. At the end it groups the ranks, and everybody receives the result, so all ranks agree.
"""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_hpc.comm.grouping import Pair
from lightning_hpc.comm.link_speed import LinkSpeed
from lightning_hpc.comm.pair_test import PairTester, TestPlan, decode_plan, encode_plan
from lightning_hpc.comm.probe_result import Matrix, ProbeResult
from lightning_hpc.comm.probe_warnings import find_warnings
from lightning_hpc.comm.rank_facts import RankFacts, gather_facts, read_facts
from lightning_hpc.comm.survey import Survey
from lightning_hpc.comm.topology import Topology

__all__ = ["ProbeResult", "probe"]

_STOP, _LEAD, _FOLLOW = 0.0, 1.0, 2.0
# The message whose time is the cost of a link: a slice of the all-reduce. On GPUs that takes no longer than a launch.
_SLICE_BYTES = 4 * 2**20
_CUDA_SLICE_BYTES = 64 * 2**20
_ORDER_LENGTH = 5  # role, peer, and the plan's three numbers


def probe(
    group: dist.ProcessGroup | None = None, *, device: torch.device | None = None, seconds: float = 2.0
) -> ProbeResult:
    """Measures latency and bandwidth between the ranks of a group, and groups ranks by them. A collective.

    Args:
        group: Process group; the default one if None. Ranks are counted within it.
        device: Where messages lie; if None, the current CUDA device where the group's backend is NCCL, else the CPU.
        seconds: Time after which nothing is measured any more that the grouping can do without.

    Returns:
        The same result on every rank.

    Raises:
        RuntimeError: If messages of a pair fail or exceed the group's time-out, and the message names the pair; or if
            torch.distributed is not initialised.
    """
    start = time.monotonic()
    group = group or dist.group.WORLD
    if group is None:
        raise RuntimeError("probe() needs a process group: call torch.distributed.init_process_group() first")
    device = device or _default_device(group)
    # Also the first collective, which opens NCCL's communicator, as batches of single messages could not.
    facts, hosts = gather_facts(read_facts(device), group)
    found: list[ProbeResult | None] = [None]
    slice_bytes = _CUDA_SLICE_BYTES if device.type == "cuda" else _SLICE_BYTES
    crew = _Crew(group, device, max_bytes=2 * slice_bytes)
    if group.rank() == 0:
        left = seconds - (time.monotonic() - start)
        survey = Survey(hosts, _machines(facts), crew.test, slice_bytes, left)
        topology = survey.run() if group.size() > 1 else Topology.flat(1)
        crew.dismiss()
        found = [_result(topology, survey, slice_bytes, facts, hosts, start)]
    else:
        crew.serve()
    dist.broadcast_object_list(found, group=group, device=device, group_src=0)
    assert found[0] is not None
    return found[0]


class _Crew:
    """The ranks as rank 0 commands them."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, max_bytes: int) -> None:
        self._tester = PairTester(group, device, max_bytes)
        self._rank = group.rank()
        self._size = group.size()

    def test(self, pairs: Sequence[Pair], plans: Sequence[TestPlan]) -> list[tuple[LinkSpeed, LinkSpeed]]:
        """Rank 0: tests pairs that share no rank at the same time."""
        try:
            for (first, second), plan in zip(pairs, plans, strict=True):
                self._order(second, [_FOLLOW, first, *encode_plan(plan)])
                self._order(first, [_LEAD, second, *encode_plan(plan)])
            own = [self._tester.lead(pair[1], plan) for pair, plan in zip(pairs, plans, strict=True) if pair[0] == 0]
            return [(self._report(first) if first else own[0], self._report(second)) for first, second in pairs]
        except RuntimeError as error:
            raise RuntimeError(f"the topology probe failed while it tested the ranks {list(pairs)}: {error}") from error

    def dismiss(self) -> None:
        """Rank 0: lets the others go on."""
        for rank in range(1, self._size):
            self._order(rank, [_STOP] * _ORDER_LENGTH)

    def serve(self) -> None:
        """The other ranks: does as rank 0 says until it lets go."""
        while True:
            try:
                role, number, *plan = self._tester.receive_numbers(_ORDER_LENGTH, 0)
            except RuntimeError as error:
                raise RuntimeError(f"the topology probe failed: rank 0, which leads it, has ended: {error}") from error
            if role == _STOP:
                return
            peer = int(number)
            try:
                test = self._tester.lead if role == _LEAD else self._tester.follow
                speed = test(peer, decode_plan(plan))
            except RuntimeError as error:
                raise RuntimeError(
                    f"the topology probe failed between ranks {self._rank} and {peer}: {error}"
                ) from error
            self._tester.send_numbers([speed.latency_seconds, speed.bytes_per_second], 0)

    def _order(self, rank: int, numbers: list[float]) -> None:
        if rank:  # rank 0, which is the lower of its pair and so always leads, needs no telling
            self._tester.send_numbers(numbers, rank)

    def _report(self, rank: int) -> LinkSpeed:
        return LinkSpeed(*self._tester.receive_numbers(2, rank))


def _default_device(group: dist.ProcessGroup) -> torch.device:
    if "nccl" in dist.get_backend_config(group) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _machines(facts: Sequence[RankFacts]) -> list[int]:
    """For each rank the lowest rank on its machine; one without a boot id is a machine of its own."""
    names = [fact.machine or f"rank {rank}" for rank, fact in enumerate(facts)]
    return [names.index(name) for name in names]


def _result(
    topology: Topology,
    survey: Survey,
    slice_bytes: int,
    facts: Sequence[RankFacts],
    hosts: Sequence[int],
    start: float,
) -> ProbeResult:
    ranks = range(len(facts))

    def matrix(name: str) -> Matrix:
        return tuple(tuple(getattr(survey.speeds.get((a, b)), name, None) for b in ranks) for a in ranks)

    return ProbeResult(
        topology,
        matrix("latency_seconds"),
        matrix("bytes_per_second"),
        tuple(facts),
        tuple(hosts),
        tuple(find_warnings(topology, survey.worst_costs(), facts, hosts, slice_bytes)),
        time.monotonic() - start,
    )
