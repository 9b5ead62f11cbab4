from dataclasses import replace
from typing import Any

import pytest

from lightning_hpc.comm.hardware import Hardware
from lightning_hpc.comm.probe_warnings import find_warnings
from lightning_hpc.comm.rank_facts import RankFacts
from lightning_hpc.comm.topology import Topology

SLICE_BYTES = 25_000_000
FACTS = [RankFacts(f"node{rank}", "b", "n", "eth0", None, "", Hardware()) for rank in range(4)]


def test_a_slow_link_is_named_with_its_figures() -> None:
    costs = {(a, b): 100.0 if b == 3 else 1.0 for b in range(4) for a in range(b)}
    (warning,) = find_warnings(Topology.flat(4), costs, FACTS, range(4), SLICE_BYTES)
    assert warning.startswith(
        "rank 3 (node3, interface eth0) reaches its peers at 2.00 Mbit/s, the others at 200 Mbit/s; is GLOO"
    )


def test_links_of_one_speed_are_not() -> None:
    costs = {(a, b): 100.0 for b in range(4) for a in range(b)}
    assert list(find_warnings(Topology.flat(4), costs, FACTS, range(4), SLICE_BYTES)) == []


def test_a_faster_interface_is_named_once_a_host() -> None:
    idle = replace(FACTS[1], interface_mbit=1000, faster_interface="ib0")
    (warning,) = find_warnings(Topology.flat(3), {}, [FACTS[0], idle, idle], [0, 1, 1], SLICE_BYTES)
    assert "rank 1 (node1) uses the interface eth0 (1000 Mbit/s), while ib0" in warning


def test_a_host_torn_apart_is_named() -> None:
    (warning,) = find_warnings(Topology.from_lists([[0], [1], [2, 3]]), {}, FACTS, [0, 0, 2, 2], SLICE_BYTES)
    assert warning.startswith("ranks 0, 1 share a host (node0)")


@pytest.mark.parametrize("domains", [[[0, 1], [2, 3]], [0, 1, 2, 3], [[[0], [1]], [[2], [3]]]])
def test_a_host_that_is_whole_at_some_level_is_not(domains: list[Any]) -> None:
    assert list(find_warnings(Topology.from_lists(domains), {}, FACTS, [0, 0, 2, 2], SLICE_BYTES)) == []
