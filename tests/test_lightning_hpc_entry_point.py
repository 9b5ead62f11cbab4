"""The installed entry point, seen from a script that knows nothing of this package."""

import os
import subprocess
import sys
from pathlib import Path

from lightning_hpc.trace import read_traces
from lightning_hpc_entry_point import VARIABLES

SCRIPT = """
import sys
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
trainer = pl.Trainer(
    accelerator="cpu", limit_train_batches=3, limit_val_batches=0, max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(BoringModel())
print(sorted({name.partition(".")[0] for name in sys.modules if name.startswith("lightning_hpc")}))
"""


def run_script(directory: Path, **variables: str) -> str:
    """Its last line."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=directory,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_script_that_is_not_told_to_trace_does_not_import_the_package(tmp_path: Path) -> None:
    assert run_script(tmp_path, LIGHTNING_HPC_REPORT="0") == "['lightning_hpc_entry_point']"
    assert list(tmp_path.iterdir()) == []


def test_a_script_that_knows_nothing_of_the_package_is_traced(tmp_path: Path) -> None:
    run_script(tmp_path, LIGHTNING_HPC_TRACE="1")
    (trace,) = read_traces(tmp_path / "step_trace")
    assert [record["step"] for record in trace.steps] == [1, 2, 3]
