"""Links and interfaces that look wrong, named."""

from collections.abc import Iterator, Mapping, Sequence

from lightning_hpc.comm.grouping import Pair, SlowRanks, all_domains, slow_ranks
from lightning_hpc.comm.link_speed import format_bits_per_second
from lightning_hpc.comm.rank_facts import RankFacts
from lightning_hpc.comm.topology import Topology

_ADVICE = "is GLOO_SOCKET_IFNAME (on CUDA: NCCL_SOCKET_IFNAME) right there, and the cable?"


def find_warnings(
    topology: Topology,
    costs: Mapping[Pair, float],
    facts: Sequence[RankFacts],
    hosts: Sequence[int],
    slice_bytes: int,
) -> Iterator[str]:
    """What a person should look at: links far slower than their peers', hosts torn apart, faster interfaces unused.

    Args:
        topology: The ranks in domains.
        costs: Seconds that a message of ``slice_bytes`` takes, for each measured pair.
        facts: What each rank says of its place.
        hosts: For each rank the lowest rank that it shares a host with.
        slice_bytes: Size of that message.
    """
    for slow in slow_ranks(costs, topology):
        yield _slow_link(slow, facts, slice_bytes)
    yield from _torn_hosts(topology, facts, hosts)
    told = set()
    for rank, fact in enumerate(facts):
        if fact.faster_interface and (fact.host, fact.interface) not in told:
            told.add((fact.host, fact.interface))
            yield (
                f"rank {rank} ({fact.host}) uses the interface {fact.interface} ({fact.interface_mbit} Mbit/s), while"
                f" {fact.faster_interface} is at least ten times faster and up; {_ADVICE}"
            )


def _torn_hosts(topology: Topology, facts: Sequence[RankFacts], hosts: Sequence[int]) -> Iterator[str]:
    """Hosts whose ranks neither lie in one node nor are a larger domain by themselves."""
    domains = {frozenset(domain) for domain in all_domains(topology)}
    for host in sorted(set(hosts)):
        ranks = {rank for rank, its_host in enumerate(hosts) if its_host == host}
        if ranks not in domains and not any(ranks <= set(node) for node in topology.nodes):
            yield (
                f"ranks {', '.join(map(str, sorted(ranks)))} share a host ({facts[host].host}), but messages between"
                " them are as slow as from elsewhere; if the machine was busy, probe again, or write the topology down"
            )


def _slow_link(slow: SlowRanks, facts: Sequence[RankFacts], slice_bytes: int) -> str:
    names = ", ".join(map(str, slow.ranks))
    fact = facts[slow.ranks[0]]
    place = f"{fact.host}, interface {fact.interface}" if fact.interface else fact.host
    ranks, reaches = ("ranks", "reach their") if len(slow.ranks) > 1 else ("rank", "reaches its")
    rate, usual = (format_bits_per_second(slice_bytes / cost) for cost in (slow.cost, slow.usual_cost))
    return f"{ranks} {names} ({place}) {reaches} peers at {rate}, the others at {usual}; {_ADVICE}"
