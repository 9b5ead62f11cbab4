"""The model against arithmetic that can be done by hand."""

from dataclasses import replace

import pytest

from lightning_hpc.comm.cost_model import (
    CodecCost,
    Prediction,
    Workload,
    predict,
    predict_choices,
    predict_ddp,
    scale_nodes,
)
from lightning_hpc.comm.link_speed import LinkSpeed
from lightning_hpc.comm.topology import Topology

FAST = LinkSpeed(1e-9, 1e15)
SLOW = LinkSpeed(1e-9, 1e6)  # 1 MB/s, so that seconds are megabytes
TWO_BY_TWO = Topology.from_lists([[0, 1], [2, 3]], [FAST, SLOW])
NUMEL = 10_000_000


def one_bucket(numel: int = NUMEL, buckets: int = 1) -> Workload:
    return Workload.uniform(
        numel=numel, forward_seconds=1.0, backward_seconds=2.0, tail_seconds=0.5, bucket_numel=numel // buckets
    )


def test_a_flat_ring_sends_its_bytes_over_each_link() -> None:
    prediction = predict_ddp(one_bucket(), TWO_BY_TWO)
    assert prediction.bytes_per_node == pytest.approx(2 * 3 / 4 * 4 * NUMEL)
    assert prediction.step_seconds == pytest.approx(1 + 2 + 60 + 0.5)
    assert prediction.exposed_seconds == pytest.approx(60)
    interleaved = Topology.from_lists([[0, 2], [1, 3]], [FAST, SLOW])
    assert predict_ddp(one_bucket(), interleaved).bytes_per_node == pytest.approx(2 * prediction.bytes_per_node)


def test_an_exact_hierarchy_sends_the_gradient_once() -> None:
    prediction = predict(one_bucket(), TWO_BY_TWO, CodecCost(), slice_numel=NUMEL)
    assert prediction.bytes_per_node == pytest.approx(4 * NUMEL)
    assert prediction.step_seconds == pytest.approx(1 + 2 + 40 + 0.5, abs=0.01)


@pytest.mark.parametrize(("nodes", "factor"), [(2, 1 / 2), (3, 2 / 3), (4, 3 / 4)])
def test_a_block_codec_sends_both_hops(nodes: int, factor: float) -> None:
    topology = Topology.from_lists([[2 * node, 2 * node + 1] for node in range(nodes)], [FAST, SLOW])
    cost = CodecCost("int8", scattered_bytes=2.0)
    prediction = predict(one_bucket(), topology, cost, slice_numel=NUMEL // 8)
    assert prediction.bytes_per_node == pytest.approx(factor * 2 * NUMEL)


def test_a_gathered_packet_goes_to_every_other_node() -> None:
    topology = Topology.from_lists([[0], [1], [2]], [FAST, SLOW])
    prediction = predict(one_bucket(), topology, CodecCost("topk", 0.0, gathered_bytes=0.1), slice_numel=NUMEL)
    assert prediction.bytes_per_node == pytest.approx(2 * 0.1 * NUMEL)


def test_communication_hides_behind_backward() -> None:
    quick = Topology.from_lists([[0], [1]], [FAST, LinkSpeed(1e-6, 4e7)])  # 1 s for all gradients
    prediction = predict(one_bucket(buckets=20), quick, CodecCost(), slice_numel=NUMEL // 20)
    assert prediction.exposed_seconds < 0.1  # all but the last bucket
    assert prediction.step_seconds == pytest.approx(3.5, abs=0.1)


def test_packing_can_be_what_limits() -> None:
    cost = CodecCost("slow", scattered_bytes=1e-6, pack_seconds=1e-6)
    prediction = predict(one_bucket(), TWO_BY_TWO, cost, slice_numel=NUMEL // 10)
    assert prediction.exposed_seconds == pytest.approx(5, abs=0.1)  # each of two ranks packs half of the numbers


def choices(workload: Workload, topology: Topology, *costs: CodecCost) -> dict[str, Prediction]:
    found = predict_choices(workload, topology, [CodecCost(), *costs], slice_numel=NUMEL // 10)
    return {prediction.name: prediction for prediction in found}


def test_what_the_lightest_codec_waited_for_beside_the_network_the_others_wait_for_too() -> None:
    quick = Topology.from_lists([[0, 1], [2, 3]], [FAST, LinkSpeed(1e-9, 1e12)])
    light, heavy = CodecCost("light", 0.1, pack_seconds=2e-8), CodecCost("heavy", 0.2, pack_seconds=8e-8)
    # 3.5 s of computation took 5 s, as four ranks shared two cores.
    seen = choices(replace(one_bucket(), observed="light", step_seconds=5.0), quick, light, heavy)
    assert seen["light"].step_seconds == pytest.approx(5.0)
    assert seen["none"].step_seconds == pytest.approx(5.0 - 0.1)  # 5 million numbers a rank are not packed
    assert seen["heavy"].step_seconds == pytest.approx(5.0 + 0.3)
    assert seen["heavy"].exposed_seconds == pytest.approx(5.3 - 3.5)
    # Plain DDP has none of the hierarchy's threads.
    assert seen["ddp"].step_seconds == pytest.approx(3.5, abs=0.01)


def test_what_waits_for_the_network_is_predicted_by_it() -> None:
    light = CodecCost("light", scattered_bytes=0.8)
    seen = choices(replace(one_bucket(), observed="light", step_seconds=8.0), TWO_BY_TWO, light)
    assert seen["none"] == choices(one_bucket(), TWO_BY_TWO, light)["none"]


def test_plain_ddp_is_predicted_in_its_own_buckets() -> None:
    many = Workload.uniform(
        numel=4 * NUMEL, forward_seconds=1.0, backward_seconds=2.0, tail_seconds=0.5, bucket_numel=NUMEL // 10
    )
    slow_to_begin = Topology.from_lists([[0, 1], [2, 3]], [FAST, LinkSpeed(0.1, 1e15)])
    # A ring of four ranks passes on six times; 40 buckets become one of a million numbers and six large ones.
    begins = 1 + 2 / 40
    assert choices(many, slow_to_begin)["ddp"].step_seconds == pytest.approx(begins + 7 * 0.6 + 0.5)
    assert predict_ddp(many, slow_to_begin).step_seconds == pytest.approx(begins + 40 * 0.6 + 0.5)


def test_three_levels_use_the_middle_link_too() -> None:
    middle = LinkSpeed(1e-9, 1e5)
    topology = Topology.from_lists([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], [FAST, middle, SLOW])
    prediction = predict(one_bucket(), topology, CodecCost(), slice_numel=NUMEL // 100)
    # Both ranks of a node send half of what they hold up, and as much down: 20 MB each way at 0.1 MB/s, overlapping.
    assert prediction.exposed_seconds == pytest.approx(200, rel=0.05)


def test_what_if_there_were_more_nodes() -> None:
    assert scale_nodes(TWO_BY_TWO, 3).domains == ((0, 1), (2, 3), (4, 5))
    assert scale_nodes(TWO_BY_TWO, 3).links == TWO_BY_TWO.links
    single = scale_nodes(TWO_BY_TWO, 1)
    assert (single.domains, single.links) == ((0, 1), (FAST,))
