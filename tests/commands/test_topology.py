import contextlib
import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from lightning_hpc.comm.hardware import Hardware
from lightning_hpc.comm.link_speed import LinkSpeed
from lightning_hpc.comm.probe_result import ProbeResult
from lightning_hpc.comm.rank_facts import RankFacts
from lightning_hpc.comm.topology import Topology
from lightning_hpc.commands.topology import main
from lightning_hpc.strategies import HPCStrategy
from tests.helpers import run_ranks

NAME = '<a href="x">&host'


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A measured topology of two nodes whose names must be escaped."""
    speeds = {0: 9e9, 1: 2.4e7}
    facts = [RankFacts(f"{NAME}{rank // 2}", "b", "n", "eth0", 1000, "", Hardware(2)) for rank in range(4)]
    ProbeResult(
        Topology.from_lists([[0, 1], [2, 3]], [LinkSpeed(5e-5, speeds[0]), LinkSpeed(6e-5, speeds[1])]),
        tuple(tuple(None if a == b else 5e-5 for a in range(4)) for b in range(4)),
        tuple(tuple(None if a == b else speeds[int(a // 2 != b // 2)] for a in range(4)) for b in range(4)),
        tuple(facts),
        (0, 0, 2, 2),
        (f"rank 3 ({NAME}1, interface eth0) is slow",),
        1.5,
    ).save(tmp_path / "saved.json")
    return tmp_path / "saved.json"


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


def _run(rank: int, world_size: int, arguments: list[str]) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        main(arguments)
    return output.getvalue()


def test_two_ranks_probe_print_and_save(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("t.json", "t.svg", "t.html")]
    printed, nothing = run_ranks(_run, 2, ["--output", *files], init_gloo=False)
    assert nothing == ""
    assert "2 ranks in one domain" in printed
    assert "MB/s from the row's rank to the column's" in printed
    assert Topology.load(files[0]).links
    assert HPCStrategy(topology=files[0])
    for file in files:
        assert f"wrote {file}" in printed
        assert Path(file).stat().st_size > 0


def test_a_saved_topology_is_shown_and_drawn(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, html = saved.with_suffix(".svg"), saved.with_suffix(".html")
    main(["--load", str(saved), "--output", str(svg), str(html)])
    printed = capsys.readouterr().out
    assert "4 ranks in 2 nodes; between nodes 24.0 MB/s" in printed
    assert "193" not in printed
    assert "192 Mbit/s" in printed
    assert f"Warning: rank 3 ({NAME}1" in printed
    assert svg.read_text() in html.read_text()


def test_the_picture_is_self_contained_and_escapes_names(saved: Path) -> None:
    svg = saved.with_suffix(".svg")
    main(["--load", str(saved), "--output", str(svg)])
    text = svg.read_text()
    root = ET.fromstring(text)
    shown = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert f"rank 3 ({NAME}1)"[:10] in " ".join(filter(None, shown))
    assert shown.count("24.0") == 8
    assert shown.count("9000") == 4
    assert "prefers-color-scheme:dark" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert f"node 1 ({NAME}1): 9.00 GB/s" in titles
    assert "rank 0 to rank 2: 24.0 MB/s, 50.0 µs" in titles


def test_a_plain_topology_can_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Topology.from_lists([[0, 1], [2]]).save(tmp_path / "t.json")
    main(["--load", str(tmp_path / "t.json"), "--output", str(tmp_path / "t.svg")])
    assert "3 ranks in 2 nodes" in capsys.readouterr().out
    ET.fromstring((tmp_path / "t.svg").read_text())


@pytest.mark.usefixtures("no_launcher")
def test_without_a_launcher_it_says_how_to_launch() -> None:
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node=2 -m lightning_hpc topology"):
        main([])


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"none\.json: there is no such file"):
        main(["--load", str(tmp_path / "none.json")])
    (tmp_path / "bad.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(SystemExit, match=r"bad\.json is not a saved topology"):
        main(["--load", str(tmp_path / "bad.json")])


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        ("t.png", "must end with one of .json, .svg, .html"),
        ("no/t.svg", "there is no folder no"),
        ("folder.svg", "it cannot be written"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_at_once(
    output: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.svg").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=complaint):
        main(["--output", output])


@pytest.mark.parametrize("argument", [["--timeout", "0"], ["--timeout", "inf"], ["--seconds", "-1"]])
def test_durations_are_checked(argument: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(argument)
    assert "does not conform to restriction v>=" in capsys.readouterr().err


def test_every_argument_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for argument in ("--output", "--load", "--backend", "--seconds", "--timeout"):
        assert argument in text
