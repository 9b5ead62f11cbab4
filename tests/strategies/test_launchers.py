"""Every launcher reaches the hierarchical path and the same weights."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]


def launch(arguments: list[str]) -> str:
    """Runs Python with a clean launcher environment and returns the digest that rank 0 prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "LOCAL_", "WORLD_", "NODE_"))}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "hierarchical all-reduce over 2 nodes" in output
    digests = re.findall(r"digest (\w{64})", output)
    assert len(digests) == 1, output
    return str(digests[0])


@pytest.fixture(scope="module")
def popen_digest() -> str:
    return launch(["-m", "tests.strategies.launch", "popen"])


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_multiprocessing_launchers(start_method: str, popen_digest: str) -> None:
    assert launch(["-m", "tests.strategies.launch", start_method]) == popen_digest


def test_torchrun(popen_digest: str) -> None:
    assert launch([*TORCHRUN, "-m", "tests.strategies.launch", "popen"]) == popen_digest
