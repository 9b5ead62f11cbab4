import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.cluster import Cluster
from benchmarks.micro.probe import HEADERS, WORKER, expected_topology, probe_cluster
from lightning_hpc.comm.pair_test import PairTester, TestPlan
from lightning_hpc.comm.probe import ProbeResult, probe
from lightning_hpc.comm.topology import Topology
from tests.helpers import RanksFailedError, require_cluster, run_ranks


def _probe(rank: int, world_size: int) -> ProbeResult:
    return probe()


def _probe_of_some(rank: int, world_size: int, members: list[int]) -> ProbeResult | None:
    group = dist.new_group(members)
    return probe(group) if rank in members else None


def _die_in_a_test(rank: int, world_size: int, victim: int) -> None:
    if rank == victim:
        PairTester._receive_turn = lambda self, peer: os._exit(1)  # type: ignore[method-assign]
    probe()


def test_ranks_of_one_machine_are_one_domain() -> None:
    results = run_ranks(_probe, 4, env={"LOCAL_WORLD_SIZE": "2"})
    assert all(result == results[0] for result in results)
    result = results[0]
    assert result.topology == Topology.flat(4)
    assert len(result.links) == 1
    assert result.hosts == (0, 0, 0, 0)
    for a in range(4):
        for b in range(4):
            assert (result.bytes_per_second[a][b] is None) == (a == b)
            assert (result.latency_seconds[a][b] is None) == (a == b)
    assert not list(Path("/dev/shm").glob("lightning_hpc.*"))


def test_a_single_rank() -> None:
    (result,) = run_ranks(_probe, 1)
    assert result.topology == Topology.flat(1)
    assert result.links == ()


def test_ranks_are_counted_within_the_group() -> None:
    results = run_ranks(_probe_of_some, 4, [1, 3])
    assert results[0] is results[2] is None
    assert results[1] == results[3]
    assert results[1].topology == Topology.flat(2)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_that_dies_ends_the_probe_with_its_name(victim: int) -> None:
    with pytest.raises(RanksFailedError) as error:
        run_ranks(_die_in_a_test, 3, victim, timeout=60)
    tested = re.search(r"the topology probe failed while it tested the ranks \[\((\d), (\d)\)\]", str(error.value))
    assert tested is not None
    assert str(victim) in tested.groups()
    assert "did not finish in time" not in str(error.value)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes of two ranks at 200 Mbit/s."""
    require_cluster()
    with Cluster(nodes=2, ranks_per_node=2, rate_mbit=200) as made:
        yield made


@pytest.mark.root
@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_nodes_and_their_bandwidth_are_found_whatever_the_order_of_ranks(
    cluster: Cluster, ranks: Sequence[int]
) -> None:
    (outcome,) = probe_cluster(cluster, [2, 2], ranks, rate_mbit=200)
    assert outcome.right
    assert outcome.bandwidth_error == pytest.approx(0, abs=0.1)


@pytest.mark.root
def test_a_wrong_guess_at_hosts_is_corrected(cluster: Cluster) -> None:
    (outcome,) = probe_cluster(cluster, [2, 2], (3, 0, 1, 2), 200, ["--guess", "apart"])
    assert outcome.right


@pytest.mark.root
def test_a_slow_link_is_named() -> None:
    require_cluster()
    rate, slow_rate = 200, 5
    slow = f"tc qdisc replace dev eth0 root handle 1: tbf rate {slow_rate}mbit burst 20kb limit 64mb"
    script = f'[ "$GROUP_RANK" != 2 ] || {slow}; exec {sys.executable} {WORKER}'
    with Cluster(nodes=3, ranks_per_node=1, rate_mbit=rate) as cluster:
        output = cluster.run(["sh", "-c", script], timeout_s=60).outputs[0]
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert Topology.from_lists(result["domains"]) == Topology.flat(3)
    (warning,) = result["warnings"]
    assert warning.startswith("rank 2 (node2, interface eth0) reaches its peers at ")
    assert "GLOO_SOCKET_IFNAME" in warning


def test_what_the_soak_expects() -> None:
    assert expected_topology([2, 1], [2, 0, 1]) == Topology.from_lists([[0, 2], [1]])
    assert expected_topology([1, 1], [1, 0]) == Topology.flat(2)
    assert HEADERS > 1
    assert Path(WORKER).is_file()


def test_a_plan_survives_the_wire() -> None:
    from lightning_hpc.comm.pair_test import decode_plan, encode_plan

    plan = TestPlan(16, 2**33, 7)
    assert decode_plan(encode_plan(plan)) == plan
