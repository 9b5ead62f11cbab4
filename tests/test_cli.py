"""The command `lightning-hpc`, run as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_hpc
from lightning_hpc.cli import main

COMMAND = [str(Path(sys.executable).with_name("lightning-hpc"))]
MODULE = [sys.executable, "-m", "lightning_hpc"]

MODEL = """
from lightning.pytorch.demos.boring_classes import BoringModel

class MyModel(BoringModel):
    pass
"""
CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  max_steps: 2
  limit_val_batches: 0
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  strategy:
    class_path: lightning_hpc.strategies.HPCStrategy
    init_args:
      topology: [[0], [1]]
  callbacks:
    - class_path: lightning_hpc.callbacks.StepTrace
model:
  class_path: my_package.MyModel
"""


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("MASTER_PORT", "WORLD_SIZE")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command", [COMMAND, MODULE], ids=["script", "module"])
def test_version_and_help(command: list[str], tmp_path: Path) -> None:
    assert run([*command, "--version"], tmp_path).stdout.strip() == f"lightning-hpc {lightning_hpc.__version__}"
    text = " ".join(run([*command, "--help"], tmp_path).stdout.split())
    assert "{fit,validate,test,predict,topology,bench,compare,report,trace}" in text
    for line in ("topology Measure how the ranks", "bench bench predict: will several nodes", "bench comm: measure"):
        assert line in text


def test_our_commands_are_refused_after_options_of_lightnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.yaml").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["lightning-hpc", "--config", str(tmp_path / "empty.yaml"), "topology"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit):
        main()
    assert "topology must be the first argument" in capsys.readouterr().err


def test_help_explains_our_arguments(tmp_path: Path) -> None:
    done = run([*COMMAND, "fit", "--trainer.strategy.help", "lightning_hpc.strategies.HPCStrategy"], tmp_path)
    text = " ".join(done.stdout.split())
    for explanation in ("ranks by node such as", "MiB of a bucket that move through the levels together"):
        assert explanation in text


def test_fit_from_yaml_finds_modules_beside_it_and_runs_twice(tmp_path: Path) -> None:
    (tmp_path / "my_package.py").write_text(MODEL)
    (tmp_path / "job.yaml").write_text(CONFIG)
    for attempt in ("attempt_000", "attempt_001"):
        done = run([*COMMAND, "fit", "--config", "job.yaml"], tmp_path)
        assert done.returncode == 0, done.stderr
        assert "hierarchical all-reduce over 2 nodes" in done.stderr
        assert len(list((tmp_path / "step_trace" / attempt).glob("rank_*.jsonl"))) == 2


def test_without_the_extra_the_way_out_is_printed(tmp_path: Path) -> None:
    code = "import sys; sys.modules['jsonargparse'] = None\nfrom lightning_hpc.cli import main\nmain()"
    done = run([sys.executable, "-c", code], tmp_path)
    assert done.returncode == 1
    assert "pip install 'lightning-hpc[cli]'" in done.stderr
