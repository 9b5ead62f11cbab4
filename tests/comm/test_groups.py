import pytest

from lightning_hpc.comm.groups import GroupPlan, make_levels, plan_groups
from lightning_hpc.comm.topology import Topology
from tests.helpers import run_ranks


def plan(domains: list) -> list[GroupPlan]:
    return list(plan_groups(Topology.from_lists(domains)))


def test_two_nodes_of_two_make_a_group_a_node_and_one_a_lane() -> None:
    assert plan([[0, 1], [2, 3]]) == [
        GroupPlan(0, (0, 1), 2),
        GroupPlan(0, (2, 3), 2),
        GroupPlan(1, (0, 2), 0),
        GroupPlan(1, (1, 3), 0),
    ]


def test_uneven_nodes_have_the_lanes_of_the_smallest() -> None:
    assert plan([[0, 1, 2], [4, 3]]) == [
        GroupPlan(0, (0, 1, 2), 2),
        GroupPlan(0, (3, 4), 2),
        GroupPlan(1, (0, 3), 0),
        GroupPlan(1, (1, 4), 0),
    ]


def test_three_levels_recurse_lane_by_lane() -> None:
    groups = plan([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    assert [group.ranks for group in groups if group.height == 0] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [group.ranks for group in groups if group.height == 1] == [(0, 2), (4, 6), (1, 3), (5, 7)]
    assert [group.ranks for group in groups if group.height == 2] == [(0, 4), (2, 6), (1, 5), (3, 7)]


@pytest.mark.parametrize("domains", [[[0, 1], [2, 3]], [[0, 3], [1, 2]], [[[0], [1, 2]], [[3], [4, 5]]]])
def test_every_rank_meets_every_other_through_the_levels(domains: list) -> None:
    topology = Topology.from_lists(domains)
    known = {rank: {rank} for rank in topology.ranks}
    groups = sorted(plan_groups(topology), key=lambda group: group.height)
    for group in groups:  # the way up and across: owners learn of all that they sum
        union = set().union(*(known[rank] for rank in group.ranks))
        for rank in group.ranks:
            known[rank] |= union
    tops = [group for group in groups if not group.lanes]
    assert tops
    assert all(known[rank] == set(topology.ranks) for group in tops for rank in group.ranks)


def _levels(rank: int, world_size: int, domains: list) -> list[tuple[str, tuple[int, ...], int, bool]]:
    levels = make_levels(Topology.from_lists(domains))
    return [(level.name, level.ranks, level.index, level.up is level.down) for level in levels]


def test_levels_of_each_rank_and_separate_groups_for_up_and_down() -> None:
    levels = run_ranks(_levels, 3, [[0], [1, 2]])
    assert levels == [
        [("inter_node", (0, 1), 0, False)],
        [("intra_node", (1, 2), 0, False), ("inter_node", (0, 1), 1, False)],
        [("intra_node", (1, 2), 1, False)],  # one lane only: this surplus rank takes no part further out
    ]
