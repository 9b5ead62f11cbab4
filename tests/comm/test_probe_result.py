import json
from pathlib import Path
from typing import Any

import pytest

from lightning_hpc.comm.hardware import Hardware
from lightning_hpc.comm.link_speed import LinkSpeed
from lightning_hpc.comm.probe_result import ProbeResult
from lightning_hpc.comm.rank_facts import RankFacts
from lightning_hpc.comm.topology import Topology

FACTS = RankFacts("a", "b", "n", "eth0", 1000, "", Hardware(2, "GPU", "GPU-1", "0000:1b:00.0", 0, ("0000:43:00.0",)))
RESULT = ProbeResult(
    Topology.from_lists([[0], [1]], [LinkSpeed(1e-5, 1e9), LinkSpeed(5e-5, 2e7)]),
    ((None, 5e-5), (5e-5, None)),
    ((None, 2e7), (2.1e7, None)),
    (FACTS, FACTS),
    (0, 1),
    ("slow",),
    1.5,
)


def test_saved_and_loaded(tmp_path: Path) -> None:
    RESULT.save(tmp_path / "t.json")
    loaded = ProbeResult.load(tmp_path / "t.json")
    assert loaded == RESULT
    assert loaded.links == RESULT.links
    assert loaded.host_names == ("a", "a")


def test_the_file_is_a_topology(tmp_path: Path) -> None:
    RESULT.save(tmp_path / "t.json")
    topology = Topology.load(tmp_path / "t.json")
    assert topology == RESULT.topology
    assert topology.links == RESULT.links


def test_a_plain_topology_has_no_figures(tmp_path: Path) -> None:
    Topology.flat(2).save(tmp_path / "t.json")
    assert ProbeResult.load(tmp_path / "t.json") == ProbeResult(Topology.flat(2))


@pytest.mark.parametrize(
    "probe",
    [
        7,
        {"bytes_per_second": [[None]]},
        {"ranks": [{"host": "a"}]},
        {"hosts": ["a"]},
        {"latency_seconds": [["a"] * 2] * 2},
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, probe: Any) -> None:
    content = {"format": "lightning_hpc.topology/1", "domains": [0, 1], "probe": probe}
    (tmp_path / "bad.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"bad\.json is not what a probe has saved"):
        ProbeResult.load(tmp_path / "bad.json")
