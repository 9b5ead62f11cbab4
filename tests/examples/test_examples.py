"""The examples run to their end, stay short, and learn."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[!_]*.py"))


def run_example(folder: Path, *arguments: str) -> str:
    """Runs an example in ``folder`` and returns all that it prints."""
    script, *rest = arguments
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *rest],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=170,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_each_is_under_120_lines(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) < 120


def test_digits_are_read(tmp_path: Path) -> None:
    output = run_example(tmp_path, "digits.py", "--max-epochs", "4")
    accuracy = re.search(r"test_accuracy\W+([\d.]+)", output)
    assert accuracy is not None, output
    assert float(accuracy[1]) > 0.9


def test_language_model_takes_the_hierarchical_path_and_sums_up(tmp_path: Path) -> None:
    config = str(ROOT / "examples" / "language_model.yaml")
    overrides = ["--trainer.max_steps=10", "--trainer.val_check_interval=5", "--model.width=64", "--model.depth=2"]
    output = run_example(tmp_path, "language_model.py", "fit", "--config", config, *overrides)
    assert "hierarchical all-reduce over 2 nodes" in output
    for word in ("10 steps with 10 optimizer steps", "tokens/s", "backward", "inter_node", str(tmp_path)):
        assert word in output
