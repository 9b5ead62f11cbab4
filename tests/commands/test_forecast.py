"""The arithmetic of predictions, on links made by hand."""

import dataclasses

import pytest

from lightning_hpc.comm.cost_model import CodecCost, Workload, predict_ddp
from lightning_hpc.comm.link_speed import LinkSpeed
from lightning_hpc.comm.topology import Topology
from lightning_hpc.commands.forecast import Job, Outlook, best, compare, forecast, verdicts

INFINITE = LinkSpeed(1e-12, 1e30)
JOB = Job(parameters=1_000_000, forward_seconds=0.1, backward_seconds=0.2, optimizer_seconds=0.05)
INT8 = CodecCost("int8", scattered_bytes=2.0)


def cluster(ranks: int, node: LinkSpeed, network: LinkSpeed) -> Topology:
    return Topology.from_lists([list(range(ranks)), list(range(ranks, 2 * ranks))], [node, network])


def pick(outlooks: list[Outlook], nodes: int, choice: str) -> Outlook:
    return next(outlook for outlook in outlooks if (outlook.nodes, outlook.choice) == (nodes, choice))


def test_an_infinite_network_gives_full_efficiency() -> None:
    found = forecast(JOB, cluster(4, INFINITE, INFINITE), [1, 2, 8], [])
    for nodes in (1, 2, 8):
        ddp = pick(found, nodes, "ddp")
        assert ddp.step_seconds == pytest.approx(0.35)
        assert ddp.efficiency == pytest.approx(1.0)
        assert ddp.throughput == pytest.approx(nodes)
    # The hierarchy's threads cost something everywhere.
    assert 0.95 < pick(found, 8, "none").efficiency < 1.0


def test_on_a_slow_network_ddp_is_slower_than_one_node_and_a_codec_faster() -> None:
    # 4 MB of gradients, with ddp in one bucket of 25 MiB: after backward a node passes 2 * 7/8 * 4 MB on, at 5 MB/s.
    found = forecast(JOB, cluster(4, INFINITE, LinkSpeed(1e-12, 5e6)), [1, 2], [INT8])
    ddp = pick(found, 2, "ddp")
    assert ddp.bytes_per_node == pytest.approx(7e6)
    assert ddp.exposed_seconds == pytest.approx(1.4)
    assert ddp.step_seconds == pytest.approx(1.75)
    assert ddp.throughput == pytest.approx(2 * 0.35 / 1.75)
    assert pick(found, 2, "none").bytes_per_node == pytest.approx(4e6)
    assert pick(found, 2, "int8").bytes_per_node == pytest.approx(1e6)
    assert pick(found, 2, "int8").throughput > 1
    (sentence,) = verdicts(found)
    assert sentence.startswith("2 nodes with ddp are 2.5 x slower than 1 node; with hpc's exact sums (none) they are")
    assert sentence.endswith("with int8 they are 1.55 x faster.")


def test_where_nothing_helps_the_verdict_says_so() -> None:
    found = forecast(JOB, cluster(4, INFINITE, LinkSpeed(1e-12, 1e5)), [2], [INT8])
    assert "so one node is the better choice" in verdicts(found)[0]
    fast = forecast(JOB, cluster(4, INFINITE, INFINITE), [2], [INT8])
    assert verdicts(fast) == [
        "2 nodes with ddp are 2.0 x faster than 1 node, and nothing that auto may choose is faster."
    ]


def test_one_node_is_plain_ddp_whatever_is_chosen_and_sends_nothing_out() -> None:
    found = forecast(JOB, cluster(4, LinkSpeed(1e-5, 1e9), LinkSpeed(1e-3, 1e6)), [1], [INT8])
    assert {dataclasses.replace(outlook, choice="") for outlook in found} == {
        dataclasses.replace(pick(found, 1, "ddp"), choice="")
    }
    assert pick(found, 1, "ddp").bytes_per_node == 0


def test_of_choices_that_are_about_as_fast_the_most_exact_is_best_and_topk_is_never() -> None:
    def outlook(choice: str, seconds: float) -> Outlook:
        return Outlook(2, choice, seconds, 1.0, 0.5, 0.0, 0.0)

    found = [outlook("ddp", 2.0), outlook("none", 1.01), outlook("int8", 1.0), outlook("topk", 0.1)]
    assert best(found, 2).choice == "none"


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (3.14, "3.1 x faster"),
        (1 / 3.14, "3.1 x slower"),
        (1.04, "1.04 x faster"),
        (1.0, "equally fast"),
        (30, "30 x faster"),
    ],
)
def test_ratios_in_words(ratio: float, words: str) -> None:
    assert compare(ratio) == words


def test_the_flat_ring_is_as_slow_as_the_slowest_link_that_it_uses() -> None:
    # The network is infinitely fast, but each rank also passes 2 * 7/8 * 4 MB on within its node.
    workload = Workload(((0.0, 1_000_000),), 0.0)
    slow_node = cluster(4, LinkSpeed(1e-12, 7e6), INFINITE)
    assert predict_ddp(workload, slow_node).step_seconds == pytest.approx(1.0)
    # With one rank a node nothing passes within one.
    alone = cluster(1, LinkSpeed(1e-12, 7e6), INFINITE)
    assert predict_ddp(workload, alone).step_seconds == pytest.approx(0.0, abs=1e-9)


def test_interleaved_ranks_share_the_link_of_their_node() -> None:
    workload = Workload(((0.0, 1_000_000),), 0.0)
    links = [INFINITE, LinkSpeed(1e-12, 1e6)]
    contiguous = predict_ddp(workload, Topology.from_lists([[0, 1], [2, 3]], links))
    interleaved = predict_ddp(workload, Topology.from_lists([[0, 2], [1, 3]], links))
    assert contiguous.step_seconds == pytest.approx(6.0)
    assert interleaved.step_seconds == pytest.approx(12.0)
    assert interleaved.bytes_per_node == pytest.approx(2 * contiguous.bytes_per_node)
