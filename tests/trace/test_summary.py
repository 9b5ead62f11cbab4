import json
import subprocess
import sys
from typing import Any

import pytest

from lightning_hpc.trace import summarize
from lightning_hpc.trace.records import span_line, step_line
from lightning_hpc.trace.timeline import Span


def step(forward_ms: int, *, comm_ms: int | None = 0, rank: int = 0, optimizer_steps: int = 1) -> dict[str, Any]:
    comm_ns = None if comm_ms is None else comm_ms * 10**6
    charged = [10**6, 0, 10**6, forward_ms * 10**6, 0, 0]
    total = sum(charged) + (comm_ns or 0)
    tags = {"step": 1, "batch": 0, "epoch": 0, "rank": rank, "optimizer_steps": optimizer_steps}
    tags |= {"samples": 4, "start_ns": 0}
    return dict(json.loads(step_line(charged, comm_ns, total, **tags, comm_bytes=0)))


def span(milliseconds: int, parent: str | None = None) -> dict[str, Any]:
    return dict(json.loads(span_line(Span("startup", None, 0, milliseconds * 10**6, parent), rank=0)))


def test_sums_means_medians_and_shares() -> None:
    summary = summarize([span(500), span(100, parent="startup"), step(2, optimizer_steps=0), step(4), step(12)])
    assert (summary.steps, summary.optimizer_steps) == (3, 2)
    assert summary.wall_seconds == pytest.approx(0.524)
    phases = {phase.name: phase for phase in summary.phases}
    forward = phases["forward"]
    assert (forward.sum_ms, forward.mean_ms, forward.median_ms, forward.share) == (18, 6, 4, 0.75)
    assert phases["total"].share == 1
    assert sum(phase.share or 0 for phase in summary.phases) == pytest.approx(2)  # the phases, and the total


def test_a_phase_that_is_unknown_in_a_step_is_unknown() -> None:
    summary = summarize([step(2), step(2, comm_ms=None)])
    comm = next(phase for phase in summary.phases if phase.name == "comm")
    assert (comm.sum_ms, comm.mean_ms, comm.median_ms, comm.share) == (None, None, None, None)


def test_the_table() -> None:
    assert summarize([step(8, comm_ms=None), step(8, comm_ms=None)]).render().splitlines() == [
        "2 steps with 2 optimizer steps in 0.0 s; 0.0 s with start, validation and the time between epochs",
        "phase                  sum        mean      median   share",
        "data_prep         2.000 ms    1.000 ms    1.000 ms   10.0%",
        "h2d               0.000 ms    0.000 ms    0.000 ms    0.0%",
        "schedule          2.000 ms    1.000 ms    1.000 ms   10.0%",
        "forward          16.000 ms    8.000 ms    8.000 ms   80.0%",
        "backward          0.000 ms    0.000 ms    0.000 ms    0.0%",
        "comm                   n/a         n/a         n/a     n/a",
        "optimizer         0.000 ms    0.000 ms    0.000 ms    0.0%",
        "unattributed      0.000 ms    0.000 ms    0.000 ms    0.0%",
        "total            20.000 ms   10.000 ms   10.000 ms  100.0%",
    ]


def test_no_step_and_several_ranks_are_errors() -> None:
    with pytest.raises(ValueError, match="none of the 1 records is a step"):
        summarize([span(1)])
    with pytest.raises(ValueError, match=r"ranks \[0, 3\]"):
        summarize([step(1), step(1, rank=3)])


def test_the_modules_import_neither_torch_nor_lightning() -> None:
    # The package's `__init__` imports Lightning to register the strategies, so a bare namespace stands in for it.
    code = """
import sys, types, pathlib
package = types.ModuleType("lightning_hpc")
package.__path__ = [sys.argv[1]]
sys.modules["lightning_hpc"] = package
import lightning_hpc.trace, lightning_hpc.trace.writer, lightning_hpc.trace.interval_means
assert not {"torch", "lightning"} & sys.modules.keys()
"""
    import lightning_hpc

    subprocess.run([sys.executable, "-c", code, lightning_hpc.__path__[0]], check=True, timeout=60)
