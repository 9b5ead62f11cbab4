from itertools import pairwise

import pytest

from lightning_hpc.comm.layout import Grain, ParameterSpec
from lightning_hpc.comm.plans import Planner
from lightning_hpc.comm.topology import Topology
from tests.comm.test_slices import levels_of

SPECS = [ParameterSpec(f"layer.{index}", 1000 + index, 1) for index in range(8)]
BLOCKS = Grain(block=64)


def planner(domains: list, rank: int = 0) -> Planner:
    topology = Topology.from_lists(domains)
    return Planner(topology, levels_of(topology, rank), SPECS)


def test_a_bucket_is_planned_once() -> None:
    plans = planner([[0, 1], [2, 3]])
    first = plans.coded(SPECS[:4], BLOCKS, 2000)
    assert plans.coded(list(SPECS[:4]), BLOCKS, 2000) is first  # residuals are bound to it
    for others in (
        plans.coded(SPECS[:3], BLOCKS, 2000),
        plans.coded(SPECS[3::-1], BLOCKS, 2000),
        plans.coded(SPECS[:4], BLOCKS, 3000),
        plans.coded(SPECS[:4], Grain(block=32), 2000),
    ):
        assert others is not first
    assert plans.exact(4000, 500) is plans.exact(4000, 500)


@pytest.mark.parametrize(
    ("domains", "lanes", "outermost"),
    [
        ([[0, 1], [2, 3]], 2, 2),
        ([[0], [1, 2]], 1, 2),
        ([[0, 1, 2], [3, 4], [5, 6, 7]], 2, 3),
        ([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], 4, 2),
        ([[[0], [1, 2]], [[3], [4, 5]]], 2, 2),
    ],
    ids=str,
)
def test_slices_have_a_leaf_for_each_lane_and_each_rank_that_sums(domains: list, lanes: int, outermost: int) -> None:
    plans = planner(domains)
    (exact, *_) = plans.exact(4000, 10_000)
    (blocks, *_) = plans.coded(SPECS, BLOCKS, 100_000)
    (whole, *_) = plans.coded(SPECS, Grain(block=None, crossing=False), 100_000)
    assert len(exact.layout.bounds) - 1 == lanes
    assert len(blocks.layout.bounds) - 1 == lanes * outermost
    assert len(whole.layout.bounds) - 1 == lanes
    # Whole parameters are spread over the lanes, and not all in the first.
    sizes = [stop - start for start, stop in pairwise(whole.layout.bounds)]
    assert max(sizes) - min(sizes) <= 1010


def test_all_ranks_make_the_same_slices() -> None:
    domains = [[0, 1, 2], [3, 4]]
    first, *others = [[plan.layout for plan in planner(domains, rank).coded(SPECS, BLOCKS, 2000)] for rank in range(5)]
    assert len(first) > 1
    assert all(other == first for other in others)


def test_small_parameters_have_slices_of_their_own() -> None:
    grain = Grain(block=1, min_numel=1004, grouped=False, crossing=False)
    plans = planner([[0, 1], [2, 3]]).coded(SPECS, grain, 100_000)
    assert [plan.layout.compressed for plan in plans] == [False, True, True, True, True]
    assert {part.parameter.name for part in plans[0].layout.parts} == {spec.name for spec in SPECS[:4]}


def test_an_empty_bucket_has_no_slices() -> None:
    plans = planner([[0], [1]])
    assert plans.exact(0, 100) == []
    assert plans.coded([ParameterSpec("empty", 0, 0)], BLOCKS, 100) == []
