import contextlib
import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_hpc.comm.topology import Topology
from lightning_hpc.commands.bench import main
from tests.helpers import run_ranks

TINY = ["--parameters", "2e4", "--tokens", "4", "--batch-size", "1", "--steps", "3"]


def _run(rank: int, world_size: int, arguments: list[str]) -> tuple[str, str]:
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            main(["comm", *arguments])
        except SystemExit as end:
            print(end.code)
    return output.getvalue(), errors.getvalue()


class Failing(BoringModel):
    """Fails where it is trained with the hierarchy."""

    def on_train_start(self) -> None:
        if type(self.trainer.strategy).__name__ != "DDPStrategy" and self.global_rank == 1:
            raise ValueError("<not> here")


def test_two_ranks_measure_all_that_they_are_asked_to(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("c.json", "c.svg", "c.html")]
    options = ["--topology", "[[0], [1]]", "--strategies", "none", "int8", "auto", "--rounds", "1", *TINY]
    (printed, said), nothing = run_ranks(_run, 2, [*options, "--output", *map(str, files)], init_gloo=False)
    assert nothing[0] == ""
    for text in ("over ddp", "auto (", "inter_node", "predicted", *(f"wrote {file}" for file in files)):
        assert text in printed
    assert "round 1/1 int8: 0." in said
    content = json.loads(files[0].read_text())
    assert content["format"] == "lightning_hpc.bench_comm/1"
    assert content["complete"] is True
    assert content["errors"] == {}
    assert content["environment"]["topology"]["domains"] == [[0], [1]]
    assert len(content["environment"]["topology"]["links"]) == 2
    strategies = {result["strategy"]: result for result in content["strategies"]}
    assert list(strategies) == ["ddp", "none", "int8", "auto"]
    assert strategies["ddp"]["speedup"] == 1.0
    parameters = content["environment"]["parameters"]
    assert strategies["none"]["sent_bytes"]["inter_node"] == 4 * parameters
    assert strategies["int8"]["sent_bytes"]["inter_node"] < 2 * parameters
    assert all(result["predicted_seconds"] > 0 for result in strategies.values())
    assert strategies["auto"]["choice"]
    assert content["fits"]["auto"][0]["decisions"]
    assert all(len(fits[0]["step_seconds"]) == 3 for fits in content["fits"].values())
    ET.fromstring(files[1].read_text())
    assert files[1].read_text() in files[2].read_text()


def test_a_strategy_that_fails_costs_only_its_own_results(tmp_path: Path) -> None:
    file = tmp_path / "c.html"
    model = [
        "--model",
        f"{__name__}.Failing",
        "--strategies",
        "none",
        "--steps",
        "3",
        "--rounds",
        "2",
        "--timeout",
        "3",
    ]
    (printed, said), _ = run_ranks(
        _run, 2, ["--topology", "[[0], [1]]", *model, "--output", str(file)], init_gloo=False
    )
    assert "none failed: rank 1: ValueError: <not> here" in printed
    assert said.count("none: failed") == 1  # and is not tried again
    assert "round 2/2 ddp: 0." in said
    assert "&lt;not&gt; here" in file.read_text()


def test_a_saved_topology_of_another_job_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    Topology.from_lists([[0, 1], [2, 3]]).save(file)
    (printed, said), _ = run_ranks(_run, 2, ["--topology", str(file), *TINY], init_gloo=False)
    assert f"--topology: the topology [[0, 1], [2, 3]] of {file} names 4 of the job's 2 ranks" in printed
    assert "measuring" not in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="has what is to be missing")
def test_cuda_where_there_is_none_is_refused() -> None:
    for printed, _ in run_ranks(_run, 2, ["--accelerator", "cuda", *TINY], init_gloo=False):
        assert "--accelerator cuda: 2 ranks on this host need as many CUDA devices, and torch sees 0" in printed


def test_one_domain_leaves_nothing_to_compare() -> None:
    (printed, _), _ = run_ranks(_run, 2, TINY, init_gloo=False)
    assert "all 2 ranks are in one domain" in printed
    assert "--topology '[[0], [1]]'" in printed


def test_without_a_launcher_it_says_how_to_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as raised:
        main(["comm"])
    assert "-m lightning_hpc bench comm" in str(raised.value)
    assert "python benchmarks/cluster.py --nodes 2 --ranks-per-node 2 --rate-mbit 200 --" in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--topology", "[[0], [0]]"], "has rank 0 more than once"),
        (
            ["--topology", "[[0], "],
            r"\[\[0\],  is neither auto, nor ranks by node such as '\[\[0, 1\], \[2, 3\]\]', nor",
        ),
        (["--topology", "no.json"], "no.json is neither auto, .* nor a file that lightning-hpc topology --output"),
        (["--output", "c.txt"], r"c\.txt: its name must end with one of"),
    ],
)
def test_arguments_are_checked_before_anything_starts(arguments: list[str], complaint: str) -> None:
    with pytest.raises(SystemExit, match=complaint):
        main(["comm", *arguments])


def test_an_unknown_strategy_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["comm", "--strategies", "int5"])
    assert "int5" in capsys.readouterr().err
