import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from lightning_hpc.comm.link_speed import LinkSpeed
from lightning_hpc.comm.topology import Topology
from lightning_hpc.commands.bench import main
from lightning_hpc.commands.bench_predict import square_matrices

CLUSTER = ["--ranks-per-node", "4", "--network-mbit", "1000"]
MODEL = ["--parameters", "1e5"]
TIME = ["--compute-ms", "10"]

MODELS = """
import torch
from lightning.pytorch import LightningModule

class Meta(LightningModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.used, self.frozen = torch.nn.Linear(width, 3), torch.nn.Linear(9, 9).requires_grad_(False)

class Lazy(LightningModule):
    def configure_model(self):
        self.layer = torch.nn.Linear(10, 10, bias=False)

class Values(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 5)
        assert self.layer.weight.sum().item() != 77

class Broken(LightningModule):
    def __init__(self):
        raise RuntimeError("no such file: weights.pt")

class Empty(LightningModule):
    pass
"""


def predict(*arguments: str) -> None:
    main(["predict", *arguments])


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bench_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "bench_models", raising=False)


def test_it_prints_a_verdict_and_writes_all_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("p.json", "p.svg", "p.html")]
    network = ["--ranks-per-node", "4", "--network-mbit", "10", "--nodes", "1", "2", "4"]
    predict(*network, *MODEL, *TIME, "--codec-time", "none", "--output", *map(str, files))
    printed = capsys.readouterr().out
    assert "2 nodes with ddp are" in printed
    assert "slower than 1 node" in printed
    assert "any: plain ddp" in printed
    assert "matrices of 1024 x 1024" in printed
    content = json.loads(files[0].read_text())
    assert content["format"] == "lightning_hpc.bench_predict/1"
    assert content["job"]["parameters"] == 100_000
    assert content["job"]["forward_seconds"] + content["job"]["backward_seconds"] == pytest.approx(0.0095)
    assert content["topology"]["links"][1]["bytes_per_second"] == pytest.approx(1.25e6 / 1.046)
    assert {cost["name"] for cost in content["codec_costs"]} >= {"int8", "int4", "lowrank", "topk"}
    assert {prediction["nodes"] for prediction in content["predictions"]} == {1, 2, 4}
    assert len(content["verdicts"]) == 2
    ET.fromstring(files[1].read_text())
    assert files[1].read_text() in files[2].read_text()
    assert all(f"wrote {file}" in printed for file in files)


def test_a_measured_topology_is_taken_and_its_network_may_be_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t.json"
    Topology.from_lists([[0, 1], [2, 3]], [LinkSpeed(1e-5, 9e9), LinkSpeed(6e-5, 2.4e7)]).save(file)
    predict("--topology", str(file), *MODEL, *TIME, "--nodes", "2")
    assert "nodes of 2 ranks; network 24.0 MB/s, 60.0 µs; within a node 9.00 GB/s" in capsys.readouterr().out
    predict("--topology", str(file), "--network-mbit", "10460", *MODEL, *TIME, "--nodes", "2")
    assert "network 1.25 GB/s, 60.0 µs" in capsys.readouterr().out


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("model", "count"),
    [(["Meta"], 15), (["Meta", "--model.width", "9"], 30), (["Lazy"], 100), (["Values"], 30)],
)
def test_a_models_trainable_parameters_are_counted(
    model: list[str], count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = model
    predict(*CLUSTER, "--model", f"bench_models.{name}", *rest, *TIME, "--nodes", "2")
    assert f"bench_models.{name} has {count} trainable parameters" in capsys.readouterr().out


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("Broken", r"(?s)cannot be made: .*no such file: weights.pt.*Give the size as --parameters"),
        ("Empty", "bench_models.Empty has no trainable parameters"),
    ],
)
def test_a_model_that_cannot_be_counted_is_named(name: str, complaint: str) -> None:
    with pytest.raises(SystemExit, match=complaint):
        predict(*CLUSTER, "--model", f"bench_models.{name}", *TIME)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([*MODEL, *TIME], "the cluster is not known: give --topology FILE.json"),
        ([*CLUSTER, *TIME], "give the model's size, either as --parameters 125e6 or as --model"),
        ([*CLUSTER, *MODEL], "give --forward-ms and --backward-ms .* or --compute-ms.*StepTrace"),
        ([*CLUSTER, *MODEL, *TIME, "--forward-ms", "3"], "--compute-ms is the sum of .* leave one out"),
        ([*CLUSTER, *MODEL, "--forward-ms", "0", "--backward-ms", "0"], "a step must take some time"),
        ([*CLUSTER, *MODEL, *TIME, "--nodes", "2", "30000"], "--nodes 30000 of 4 ranks: no more than 100000 ranks"),
        ([*CLUSTER, *MODEL, *TIME, "--topology", "t.json"], "--ranks-per-node 4 contradicts --topology t.json"),
        ([*MODEL, *TIME, "--topology", "no.json"], r"no\.json: there is no such file; lightning-hpc topology --output"),
        (
            [*CLUSTER, *MODEL, *TIME, "--output", "p.png"],
            r"p\.png: its name must end with one of \.json, \.svg, \.html",
        ),
        ([*CLUSTER, *MODEL, *TIME, "--output", "no/p.svg"], "there is no folder no; make it first"),
    ],
)
def test_what_is_missing_or_contradicts_is_said_with_the_way_out(arguments: list[str], complaint: str) -> None:
    with pytest.raises(SystemExit, match=complaint):
        predict(*arguments)


@pytest.mark.parametrize(
    ("lists", "links", "complaint"),
    [
        ([[0, 1], [2, 3]], 0, "has no speed between nodes; give it with --network-mbit"),
        ([0, 1], 1, "has no speed between nodes; give it with --network-mbit"),
        ([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], 3, "has 3 levels"),
    ],
)
def test_a_topology_that_does_not_say_enough_is_refused(
    lists: list[object], links: int, complaint: str, tmp_path: Path
) -> None:
    file = tmp_path / "t.json"
    Topology.from_lists(lists, [LinkSpeed(1e-5, 1e9)] * links).save(file)
    with pytest.raises(SystemExit, match=complaint):
        predict("--topology", str(file), *MODEL, *TIME)


@pytest.mark.parametrize("value", ["-1", "0", "nan", "inf", "1e300"])
def test_numbers_are_checked(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        predict("--ranks-per-node", "4", "--network-mbit", value, *MODEL, *TIME)
    assert f"{value} does not conform to restriction v>=1e-09 and v<=1000000000000.0" in capsys.readouterr().err


@pytest.mark.parametrize("numel", [1, 1023, 1024, 3_300_000, 2**20])
def test_matrices_have_as_many_elements_as_asked_for(numel: int) -> None:
    assert sum(spec.numel for spec in square_matrices(numel)) == numel
    assert all(spec.numel % spec.rows == 0 for spec in square_matrices(numel))


@pytest.mark.parametrize("command", ["predict", "comm"])
def test_every_argument_is_explained(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_hpc.commands import bench_comm, bench_predict

    parser = {"predict": bench_predict, "comm": bench_comm}[command].make_parser()
    assert all(action.help for action in parser._actions)
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: lightning-hpc bench {command} ")
    assert "--output" in text
    assert "--model.help" in text
    headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["options:"]  # and none that is Lightning's documentation of a class
