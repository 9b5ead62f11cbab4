import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_hpc.comm.link_speed import LinkSpeed
from lightning_hpc.comm.topology import Topology


def test_levels_of_a_cluster() -> None:
    topology = Topology.from_lists([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    assert topology.depth == 3
    assert topology.world_size == 8
    assert topology.nodes == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert str(topology) == "[[[0, 1], [2, 3]], [[4, 5], [6, 7]]]"


def test_nodes_may_differ_in_size_and_ranks_may_be_interleaved() -> None:
    topology = Topology.from_lists([[0, 3, 4], [1], [2, 5]])
    assert topology.depth == 2
    assert topology.ranks == (0, 3, 4, 1, 2, 5)


@pytest.mark.parametrize("domains", [[0, 1, 2], [[0, 1, 2]], [[[0, 1, 2]]]])
def test_a_level_with_one_domain_is_dropped(domains: list[Any]) -> None:
    assert Topology.from_lists(domains) == Topology.flat(3)
    assert Topology.from_lists(domains).depth == 1


def test_numpy_ranks_are_ranks() -> None:
    assert Topology.from_lists(np.arange(4).reshape(2, 2)) == Topology.from_lists([[0, 1], [2, 3]])
    assert Topology.from_lists([[np.int64(0)], [np.int64(1)]]) == Topology.from_lists([[0], [1]])


def test_one_rank_a_node_is_still_two_levels() -> None:
    assert Topology.from_lists([[0], [1]]).depth == 2


def test_node_ranks_of_a_launcher() -> None:
    assert Topology.from_node_ranks([0, 1, 0, 1]).nodes == ((0, 2), (1, 3))
    assert Topology.from_node_ranks([7, 7]).depth == 1


@pytest.mark.parametrize(
    ("domains", "complaint"),
    [
        ([[0, 1], [1, 2]], "rank 1 more than once"),
        ([[0, 1], [3]], "leaves out rank 2"),
        ([[0], [10**12]], "leaves out rank 1"),
        ([[1, 2]], "leaves out rank 0"),
        ([[0, 1], 2], "different depths"),
        ([[0, 1], []], "empty domain"),
        ([], "empty domain"),
        ([[0, "1"]], "has '1' where a rank"),
        ([[0, -1]], "has -1 where a rank"),
        ([[0, True]], "has True where a rank"),
        ([[0, 1.0]], "has 1.0 where a rank"),
        (7, "topology=7 is not a list"),
        (None, "topology=None is not a list"),
    ],
)
def test_wrong_input_is_quoted_and_the_way_out_shown(domains: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as error:
        Topology.from_lists(domains)
    assert "[[0, 1], [2, 3]]" in str(error.value)


def test_wrong_world_size_quotes_both() -> None:
    with pytest.raises(ValueError, match=r"\[\[0, 1\], \[2, 3\]\] names 4 of the job's 8 ranks"):
        Topology.from_lists([[0, 1], [2, 3]]).require_world_size(8)


def test_wrong_world_size_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    Topology.from_lists([[0, 1], [2, 3]]).save(file)
    loaded = Topology.load(file)
    loaded.require_world_size(4)
    with pytest.raises(ValueError, match=rf"\[2, 3\]\] of {re.escape(str(file))} names 4 of the job's 8 ranks"):
        loaded.require_world_size(8)
    assert "cluster.json" not in json.dumps(loaded.to_json())


def test_saved_and_loaded(tmp_path: Path) -> None:
    topology = Topology.from_lists([[0, 2], [1]])
    topology.save(tmp_path / "cluster.json")
    assert Topology.load(tmp_path / "cluster.json") == topology


@pytest.mark.parametrize(
    "content",
    ["", "{", "[[0, 1]]", "[" * 100_000, '{"format": "other/1"}', '{"format": "lightning_hpc.topology/1"}'],
)
def test_a_file_that_is_no_topology_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(ValueError, match=r"bad\.json is not a saved topology"):
        Topology.load(tmp_path / "bad.json")


def test_a_missing_file_says_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="'auto', 'flat' or the path"):
        Topology.load(tmp_path / "none.json")


def test_saved_file_is_plain_json(tmp_path: Path) -> None:
    Topology.flat(2).save(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text()) == {"format": "lightning_hpc.topology/1", "domains": [0, 1]}


def test_links_are_saved_with_it(tmp_path: Path) -> None:
    links = (LinkSpeed(5e-5, 9e9), LinkSpeed(6e-5, 2.4e7))
    topology = Topology.from_lists([[0, 1], [2, 3]], links)
    topology.save(tmp_path / "t.json")
    assert Topology.load(tmp_path / "t.json").links == links
    assert topology == Topology.from_lists([[0, 1], [2, 3]])  # speed is no part of what a topology is


def test_there_is_one_link_a_level() -> None:
    with pytest.raises(ValueError, match="2 levels, but 1 links"):
        Topology.from_lists([[0, 1], [2, 3]], [LinkSpeed(5e-5, 9e9)])


@pytest.mark.parametrize("links", [[7], [{"latency_seconds": 1}], [{"latency_seconds": 1, "bytes_per_second": 0}], 3])
def test_damaged_links_are_named(tmp_path: Path, links: Any) -> None:
    content = {"format": "lightning_hpc.topology/1", "domains": [0, 1], "links": links}
    (tmp_path / "bad.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"bad\.json is not a saved topology"):
        Topology.load(tmp_path / "bad.json")
