"""What importing the package does, seen from a fresh interpreter."""

import subprocess
import sys

import pytest


def run_python(code: str) -> str:
    """Runs code with warnings as errors and returns its output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_starts_nothing_configures_nothing_and_warns_of_nothing() -> None:
    run_python("""
import logging, os, sys, threading, warnings
import lightning.pytorch, torch.distributed  # what they do at import is theirs
handlers = {name: list(logging.getLogger(name).handlers) for name in (None, "lightning", "lightning.pytorch", "torch")}
levels = {name: logging.getLogger(name).level for name in handlers}
threads, environment = threading.active_count(), dict(os.environ)
warnings.simplefilter("error")
import lightning_hpc, lightning_hpc.strategies, lightning_hpc.comm, lightning_hpc.callbacks, lightning_hpc.trace
import lightning_hpc.data, lightning_hpc.memory, lightning_hpc.report
assert threading.active_count() == threads
assert dict(os.environ) == environment
assert not torch.distributed.is_initialized()
assert handlers == {name: list(logging.getLogger(name).handlers) for name in handlers}
assert levels == {name: logging.getLogger(name).level for name in levels}
assert "pytorch_lightning" not in sys.modules
""")


def test_inner_packages_know_nothing_of_lightning() -> None:
    run_python("""
import ast, pathlib, importlib.util
root = pathlib.Path(importlib.util.find_spec("lightning_hpc").origin).parent
forbidden = {"comm": {"lightning"}, "memory": {"lightning"}}
forbidden |= {"trace": {"lightning", "torch"}, "report": {"lightning", "torch"}}
for folder, packages in forbidden.items():
    for file in (root / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not packages & {name.split(".")[0] for name in names}, (file, names)
""")


@pytest.mark.parametrize(
    "imports",
    [
        "import lightning_hpc; import pytorch_lightning",
        "import pytorch_lightning; import lightning_hpc",
        "import lightning_hpc; from pytorch_lightning import LightningModule; import pytorch_lightning",
    ],
)
def test_a_trainer_of_pytorch_lightning_is_told_of_the_mix(imports: str) -> None:
    run_python(f"""
{imports}
try:
    pytorch_lightning.Trainer(strategy="hpc", accelerator="cpu")
except TypeError as error:
    assert "lightning.pytorch" in str(error) and "pytorch_lightning" in str(error), error
else:
    raise AssertionError("accepted")
try:
    pytorch_lightning.Trainer(strategy=lightning_hpc.strategies.HPCStrategy(), accelerator="cpu")
except ValueError as error:
    assert "for lightning.pytorch.Trainer, not pytorch_lightning.Trainer" in str(error), error
else:
    raise AssertionError("accepted")
""")


def test_a_model_of_pytorch_lightning_is_told_of_the_mix() -> None:
    run_python("""
import lightning_hpc
from lightning.pytorch import Trainer
from pytorch_lightning.demos.boring_classes import BoringModel
try:
    Trainer(strategy="hpc", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False).fit(BoringModel())
except TypeError as error:
    assert "mixed" in str(error) or "pytorch_lightning" in str(error), error
else:
    raise AssertionError("accepted")
""")
