"""The invariant: whatever the levels, their ranks agree where a slice is cut, and each element has one owner."""

from itertools import pairwise
from typing import Any, cast

import pytest
import torch

from lightning_hpc.comm.groups import Level, count_leaves, plan_groups
from lightning_hpc.comm.layout import Grain, ParameterSpec, SliceLayout, assign_homes, codec_slices, exact_slices
from lightning_hpc.comm.slices import Slice, SlicePlan
from lightning_hpc.comm.topology import Topology

TOPOLOGIES: list[list[Any]] = [
    [[0, 1], [2, 3]],
    [[0], [1]],
    [[0], [1, 2]],
    [[4, 1], [2, 3, 0]],
    [[0], [1], [2]],
    [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]],
    [[[0], [1, 2]], [[3], [4, 5]]],
    [[[0, 1], [2, 3]], [[4, 5], [6, 7], [8, 9, 10]]],
    [[[[0, 1], [2, 3]], [[4, 5], [6, 7]]], [[[8, 9], [10, 11]], [[12, 13], [14, 15, 16]]]],
]
SPECS = [ParameterSpec("a", 1000, 10), ParameterSpec("b", 3, 3), ParameterSpec("c", 130, 13), ParameterSpec("d", 1, 1)]


def levels_of(topology: Topology, rank: int) -> list[Level]:
    """As `make_levels` gives them, without process groups."""
    nobody = cast(Any, None)
    return [
        Level(plan.height, plan.ranks, plan.ranks.index(rank), plan.lanes, nobody, nobody)
        for plan in plan_groups(topology)
        if rank in plan.ranks and len(plan.ranks) > 1
    ]


def layouts_of(topology: Topology) -> dict[str, SliceLayout]:
    lanes, outermost = count_leaves(topology)
    layouts = {f"exact {numel}": exact_slices(numel, lanes, 10_000)[0] for numel in (1, 2, 1134)}
    for name, grain in {
        "block": Grain(block=64),
        "sparse": Grain(block=1, crossing=False),
        "whole": Grain(block=None, crossing=False),
    }.items():
        leaves = lanes * (outermost if grain.crossing else 1)
        layouts[name] = codec_slices(SPECS, leaves, 10_000, grain, assign_homes(SPECS, leaves))[0]
    return layouts


@pytest.mark.parametrize("domains", TOPOLOGIES, ids=str)
def test_ranks_of_a_level_agree_and_every_element_has_one_owner(domains: list[Any]) -> None:
    topology = Topology.from_lists(domains)
    for name, layout in layouts_of(topology).items():
        plans = {rank: SlicePlan.make(layout, levels_of(topology, rank)) for rank in topology.ranks}
        for plan in plans.values():
            assert plan.shards[0] == (0, layout.numel)
            assert len(plan.shards) == len(plan.splits) + 1
        for rank, plan in plans.items():
            for depth, level in enumerate(levels_of(topology, rank)[: len(plan.splits)]):
                start, stop = plan.shards[depth]
                assert sum(plan.splits[depth]) == stop - start, name
                for other in level.ranks:
                    theirs = plans[other]
                    at = levels_of(topology, other).index(level_of(topology, other, level.height))
                    assert theirs.shards[at] == plan.shards[depth], name
                    assert theirs.splits[at] == plan.splits[depth], name
                before = start + sum(plan.splits[depth][: level.index])
                mine = plan.splits[depth][level.index]
                assert plan.shards[depth + 1][1] - plan.shards[depth + 1][0] == mine
                assert mine == 0 or plan.shards[depth + 1][0] == before, name
        assert_runs(topology, layout, plans)


def level_of(topology: Topology, rank: int, height: int) -> Level:
    return next(level for level in levels_of(topology, rank) if level.height == height)


def assert_runs(topology: Topology, layout: SliceLayout, plans: dict[int, SlicePlan]) -> None:
    """Lanes tile the slice, owners tile their lane, and ranks that are surplus have nothing."""
    ends = [0] * (layout.numel + 1)
    across = [plan for plan in plan_groups(topology) if not plan.lanes]
    crossing = {rank for plan in across for rank in plan.ranks}
    for group in across:
        runs = {(plans[rank].run.start, plans[rank].run.stop) for rank in group.ranks}
        assert len(runs) == 1
        (start, stop) = runs.pop()
        ends[start] += 1
        ends[stop] -= 1
        owned = [plans[rank].owned for rank in group.ranks]
        if len(layout.bounds) - 1 == len(across) * len(group.ranks):
            assert owned[0].start == start
            assert owned[-1].stop == stop
            assert all(one.stop == other.start for one, other in pairwise(owned))
            assert sum((run.parts for run in owned), ()) == plans[group.ranks[0]].run.parts
        else:  # not cut further: each sums all
            assert {(run.start, run.stop) for run in owned} == {(start, stop)}
    coverage, total = [], 0
    for change in ends[:-1]:
        total += change
        coverage.append(total)
    assert coverage == [1] * layout.numel
    for rank in topology.ranks:
        if rank not in crossing:
            assert plans[rank].run.numel == 0
            assert plans[rank].run.parts == ()


def test_a_slice_for_a_codec_is_a_copy_that_finds_its_way_back() -> None:
    bucket = torch.arange(1134.0)
    (layout,) = codec_slices(SPECS, 4, 10_000, Grain(block=64), assign_homes(SPECS, 4))
    item = Slice(SlicePlan.make(layout, []), bucket, None)
    item.open()
    assert item.buffer.numel() == layout.numel > bucket.numel()
    assert item.buffer.sum() == bucket.sum()  # padded with zeros
    item.buffer.mul_(2)
    assert torch.equal(bucket, torch.arange(1134.0))
    item.close()
    assert torch.equal(bucket, 2 * torch.arange(1134.0))


def test_an_exact_slice_is_a_view_of_the_bucket() -> None:
    bucket = torch.zeros(100)
    for layout in exact_slices(100, 2, 30):
        item = Slice(SlicePlan.make(layout, []), bucket, None)
        item.open()
        item.shard(0).add_(1)
        item.close()
    assert torch.equal(bucket, torch.ones(100))


def test_values_and_shards_are_what_the_plan_says() -> None:
    topology = Topology.from_lists([[0, 1], [2, 3]])
    (layout,) = codec_slices(SPECS, 4, 10_000, Grain(block=64), assign_homes(SPECS, 4))
    plan = SlicePlan.make(layout, levels_of(topology, 3))
    item = Slice(plan, torch.arange(1134.0), None)
    item.open()
    assert torch.equal(item.shard(1), item.values)
    assert torch.equal(item.shard(2), item.buffer[plan.owned.start : plan.owned.stop])
    assert plan.run.start == layout.bounds[2]  # rank 3 has the second lane of two …
    assert plan.owned.start == layout.bounds[3]  # … and is the second of the two that sum it
