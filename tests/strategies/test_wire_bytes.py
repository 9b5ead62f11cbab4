"""Bytes on the emulated link, headers included, against the lower bound of an exact hierarchy."""

import sys
from pathlib import Path

import pytest

from benchmarks.cluster import Cluster
from examples.language_model import LanguageModel
from tests.helpers import require_cluster

WORKER = Path(__file__).parents[2] / "benchmarks" / "task" / "fit_language_model.py"
HEADERS = 1.046  # Ethernet, IP and TCP at an MTU of 1500


def _run(steps: int) -> dict[int, int]:
    options = {"strategies": "hpc", "steps": steps, "rounds": 1, "context": 16, "batch-size": 1}
    command = [
        sys.executable,
        str(WORKER),
        *(text for key, value in options.items() for text in (f"--{key}", str(value))),
    ]
    with Cluster(nodes=2, ranks_per_node=2, rate_mbit=1000) as cluster:
        cluster.run(command, timeout_s=90)
        return cluster.wire_bytes()


@pytest.mark.root
def test_language_model_sends_no_more_than_its_gradient_once_a_node_and_step() -> None:
    require_cluster()
    gradient_bytes = 4 * sum(parameter.numel() for parameter in LanguageModel(context=16).parameters())
    few, many = 2, 52  # so many, since the probe at the start does not send the same each time
    before, after = _run(few), _run(many)
    for node in (0, 1):
        sent = (after[node] - before[node]) / (many - few)  # what start and end cost cancels out
        assert 0.98 <= sent / gradient_bytes <= 1.05 * HEADERS
