"""Grouping by the gap in the numbers, on made-up numbers."""

import random
from collections.abc import Sequence

import pytest

from lightning_hpc.comm.grouping import Pair, group_ranks, height_of, partitions, slow_ranks
from lightning_hpc.comm.topology import Topology

COSTS = (0.5e-3, 35e-3, 350e-3)
"""Seconds of a slice within a node, between nodes, between racks."""

SHAPES = {
    "2x2": [[0, 1], [2, 3]],
    "4x4": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
    "uneven": [[0, 1, 2], [3], [4, 5]],
    "one and three": [[0], [1, 2, 3]],
    "racks": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
    "uneven racks": [[[0, 1], [2, 3], [4]], [[5, 6], [7, 8, 9]]],
    "flat": [0, 1, 2, 3, 4, 5],
}


def costs_of(topology: Topology, generator: random.Random, jitter: float) -> dict[Pair, float]:
    return {
        (a, b): COSTS[height_of(topology, (a, b))] * generator.uniform(1 - jitter, 1 + jitter)
        for b in range(topology.world_size)
        for a in range(b)
    }


def hosts_of(topology: Topology) -> list[int]:
    node_of = {rank: min(node) for node in topology.nodes for rank in node}
    return [node_of[rank] for rank in range(topology.world_size)]


def permuted(domains: Sequence[object], places: Sequence[int]) -> list[object]:
    """The same domains with rank r renamed to ``places[r]``, in the order in which `group_ranks` gives them."""
    renamed = [places[item] if isinstance(item, int) else permuted(item, places) for item in domains]
    return sorted(renamed, key=lowest)


def lowest(item: object) -> int:
    return item if isinstance(item, int) else min(lowest(child) for child in item)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_found_in_noise_whatever_the_order_of_ranks(shape: str) -> None:
    for seed in range(200):
        generator = random.Random(seed)
        count = Topology.from_lists(SHAPES[shape]).world_size
        topology = Topology.from_lists(permuted(SHAPES[shape], generator.sample(range(count), count)))
        assert group_ranks(costs_of(topology, generator, jitter=0.3), hosts_of(topology)) == topology, seed


def test_wrong_hosts_do_not_matter_for_nodes_of_equal_size() -> None:
    for seed in range(50):
        generator = random.Random(seed)
        topology = Topology.from_lists(SHAPES["racks"])
        hosts = [generator.randrange(8) for _ in range(8)]
        assert group_ranks(costs_of(topology, generator, jitter=0.3), hosts) == topology


def test_few_pairs_that_connect_all_ranks_are_enough() -> None:
    assert group_ranks({(0, 2): 1.0, (1, 3): 1.0, (2, 3): 40.0}, [0, 0, 0, 0]) == Topology.from_lists([[0, 2], [1, 3]])


def test_one_rank() -> None:
    assert group_ranks({}, [0]) == Topology.flat(1)
    assert slow_ranks({}, Topology.flat(1)) == []


def test_two_ranks_have_nothing_to_compare() -> None:
    assert group_ranks({(0, 1): 7.0}, [0, 1]) == Topology.flat(2)
    assert slow_ranks({(0, 1): 7.0}, Topology.flat(2)) == []


def test_a_pair_that_noise_made_slow_changes_nothing() -> None:
    topology = Topology.from_lists(SHAPES["4x4"])
    for pair in [(0, 1), (4, 7), (8, 12)]:
        costs = costs_of(topology, random.Random(0), jitter=0.1)
        costs[pair] *= 100
        assert group_ranks(costs, hosts_of(topology)) == topology


def test_unconnected_ranks_are_a_fault_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="unconnected"):
        partitions({(0, 1): 1.0}, 3)


def test_a_node_with_a_bad_link_is_no_level_but_named() -> None:
    topology = Topology.from_lists([[0, 1], [2, 3], [4, 5], [6, 7]])
    costs = costs_of(topology, random.Random(0), jitter=0.3)
    costs = {
        pair: cost * (10 if height_of(topology, pair) and {6, 7} & set(pair) else 1) for pair, cost in costs.items()
    }
    assert group_ranks(costs, hosts_of(topology)) == topology
    (slow,) = slow_ranks(costs, topology)
    assert slow.ranks == (6, 7)
    assert slow.height == 1
    assert slow.cost / slow.usual_cost == pytest.approx(10, rel=0.6)


def test_two_nodes_of_six_with_bad_links_are_named() -> None:
    topology = Topology.flat(6)
    costs = {(a, b): 1.0 if b < 4 else 100.0 for b in range(6) for a in range(b)}
    assert group_ranks(costs, range(6)) == topology
    assert [slow.ranks for slow in slow_ranks(costs, topology)] == [(4,), (5,)]


def test_one_rank_beside_a_full_host_is_a_node_and_not_a_bad_link() -> None:
    costs = {(a, b): 1.0 if b < 3 else 100.0 for b in range(4) for a in range(b)}
    assert group_ranks(costs, [0, 0, 0, 3]) == Topology.from_lists([[0, 1, 2], [3]])
    assert slow_ranks(costs, Topology.from_lists([[0, 1, 2], [3]])) == []


def test_noise_within_a_level_is_not_named() -> None:
    for seed in range(200):
        topology = Topology.from_lists(SHAPES["4x4"])
        assert slow_ranks(costs_of(topology, random.Random(seed), jitter=0.3), topology) == []


def test_the_level_of_a_pair() -> None:
    topology = Topology.from_lists(SHAPES["racks"])
    assert [height_of(topology, pair) for pair in [(0, 1), (0, 3), (3, 4)]] == [0, 1, 2]
    assert height_of(Topology.flat(2), (0, 1)) == 0
