"""Which pairs are measured, on made-up clusters that answer at once."""

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from lightning_hpc.comm.grouping import Pair, height_of
from lightning_hpc.comm.link_speed import LinkSpeed
from lightning_hpc.comm.pair_test import TestPlan
from lightning_hpc.comm.survey import Survey
from lightning_hpc.comm.topology import Topology

SLICE_BYTES = 4 * 2**20
RATES = (8e9, 120e6, 6e6)
"""Bytes per second within a node, between nodes, between racks."""


class MadeUpCluster:
    """Answers tests; noise makes a link look slower, never faster, and sometimes by far."""

    def __init__(self, topology: Topology, seed: int, hiccups: float = 0.0) -> None:
        self.topology = topology
        self.waves: list[list[Pair]] = []
        self._generator = random.Random(seed)
        self._hiccups = hiccups

    def measure(self, pairs: Sequence[Pair], plans: Sequence[TestPlan]) -> list[tuple[LinkSpeed, LinkSpeed]]:
        assert len(set(itertools.chain(*pairs))) == 2 * len(pairs), "a rank in two tests at once"
        assert len(pairs) == len(plans)
        self.waves.append(list(pairs))
        return [(self._speed(pair), self._speed(pair)) for pair in pairs]

    def _speed(self, pair: Pair) -> LinkSpeed:
        rate = RATES[height_of(self.topology, pair)] * self._generator.uniform(0.7, 1)
        return LinkSpeed(5e-5, rate / 20 if self._generator.random() < self._hiccups else rate)

    @property
    def tests(self) -> int:
        return sum(map(len, self.waves))


def dealt(shape: Sequence[int], generator: random.Random) -> Topology:
    """Nodes of the given sizes with ranks dealt at random."""
    ranks = generator.sample(range(sum(shape)), sum(shape))
    nodes = [sorted(ranks.pop() for _ in range(count)) for count in shape]
    return Topology.from_lists(sorted(nodes))


def right(topology: Topology) -> list[int]:
    return [next(min(node) for node in topology.nodes if rank in node) for rank in range(topology.world_size)]


def apart(topology: Topology) -> list[int]:
    return list(range(topology.world_size))


def together(topology: Topology) -> list[int]:
    return [0] * topology.world_size


def crossed(topology: Topology) -> list[int]:
    """Hosts that each have one rank of every node, as containers that share names across nodes would."""
    hosts = [0] * topology.world_size
    for node in topology.nodes:
        for index, rank in enumerate(node):
            hosts[rank] = index
    return hosts


def survey(cluster: MadeUpCluster, hosts: Sequence[int], machines: Sequence[int] | None = None) -> Survey:
    return Survey(hosts, machines or hosts, cluster.measure, SLICE_BYTES, seconds=60)


@pytest.mark.parametrize("guess", [right, apart, together, crossed])
@pytest.mark.parametrize("shape", [(2, 2), (4, 4, 4, 4), (3, 2), (4, 3, 2, 2)])
def test_nodes_are_found_whatever_the_guess_at_hosts(shape: Sequence[int], guess: Callable[..., list[int]]) -> None:
    for seed in range(20):
        cluster = MadeUpCluster(dealt(shape, random.Random(seed)), seed)
        found = survey(cluster, guess(cluster.topology)).run()
        assert found == cluster.topology, seed
        assert [link.bytes_per_second for link in found.links] == pytest.approx(RATES[:2], rel=0.3)


def test_racks_are_found() -> None:
    topology = Topology.from_lists([[[0, 5], [1, 4]], [[2, 7], [3, 6]]])
    for guess in (right, apart, together, crossed):
        assert survey(MadeUpCluster(topology, 0), guess(topology)).run() == topology


def test_hiccups_tear_no_host_apart() -> None:
    wrong = 0
    for seed in range(200):
        cluster = MadeUpCluster(dealt((2, 2), random.Random(seed)), seed, hiccups=0.15)
        wrong += survey(cluster, right(cluster.topology)).run() != cluster.topology
    assert wrong <= 1  # both ways of one pair, and again so: 0.15 ** 4 for each of two pairs


def test_a_right_guess_saves_tests() -> None:
    topology = dealt((8,) * 8, random.Random(0))
    cluster = MadeUpCluster(topology, 0)
    assert survey(cluster, right(topology)).run() == topology
    within, between = 8 * 28, 4 * 28 + 3  # of which most between nodes take two or three
    assert cluster.tests <= within + between
    assert len(cluster.waves) <= 28 + 4 * 10 + 1


def test_many_ranks_without_any_gap() -> None:
    cluster = MadeUpCluster(Topology.flat(64), 0)
    assert survey(cluster, range(64)).run() == Topology.flat(64)
    assert cluster.tests <= 64 * 6 + 2 * 63  # those at distances 1 to 32, and what holds them together twice more


def test_two_tests_at_once_share_no_hosts_link() -> None:
    topology = dealt((4, 4, 4, 4), random.Random(0))
    hosts = right(topology)
    cluster = MadeUpCluster(topology, 0)
    survey(cluster, hosts, machines=[0] * 16).run()
    for wave in cluster.waves:
        for first, second in itertools.combinations(wave, 2):
            assert {hosts[rank] for rank in first}.isdisjoint({hosts[rank] for rank in second})
        # One machine that emulates all: two tests across hosts at once, or one within a host.
        assert len(wave) <= (1 if any(hosts[a] == hosts[b] for a, b in wave) else 2)


def test_without_time_only_the_grouping_is_measured() -> None:
    cluster = MadeUpCluster(Topology.from_lists([[0, 1], [2, 3]]), 0)
    found = Survey([0, 0, 2, 2], [0] * 4, cluster.measure, SLICE_BYTES, seconds=0).run()
    assert found == cluster.topology
    assert cluster.tests == 3 + 1  # two nodes, the link between them, and that once with long messages


class BurstyCluster(MadeUpCluster):
    """Lets short messages pass at once between nodes, and disturbs the first test of each pair so that it reads low."""

    def measure(self, pairs: Sequence[Pair], plans: Sequence[TestPlan]) -> list[tuple[LinkSpeed, LinkSpeed]]:
        speeds = super().measure(pairs, plans)
        for index, (pair, plan) in enumerate(zip(pairs, plans, strict=True)):
            if height_of(self.topology, pair) == 0:
                continue
            if plan.first_bytes == plan.max_bytes < 125_000:
                speeds[index] = (LinkSpeed(5e-5, 1e9), LinkSpeed(5e-5, 1e9))
            elif plan.first_bytes < plan.max_bytes:
                speeds[index] = (LinkSpeed(5e-5, 1e6), LinkSpeed(5e-5, 1e6))
        return speeds


def test_a_message_that_a_shaper_lets_pass_at_once_is_no_figure() -> None:
    cluster = BurstyCluster(Topology.from_lists([[0, 1], [2, 3]]), 0)
    found = survey(cluster, right(cluster.topology)).run()
    assert found.links[1].bytes_per_second == pytest.approx(RATES[1], rel=0.3)
