"""Real fits on one rank, recorded once by `real_runs`, that no rule was made with.

Steps are rows of epoch, batch, optimizer steps, allocator retries (pretended, null if none) and `_TIMES`.
"""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

from lightning_hpc.trace import Trace
from tests.trace.judging import confusion_table, first_answer, right_share

_TIMES = ("data_prep", "h2d", "schedule", "forward", "backward", "comm", "optimizer", "unattributed", "total")


def read_runs() -> list[dict[str, Any]]:
    return list(json.loads(gzip.decompress(Path(__file__).with_name("recorded_runs.json.gz").read_bytes())))


def trace_of(run: dict[str, Any]) -> Trace:
    records = []
    for epoch, batch, optimizer_steps, retries, *times in run["steps"]:
        record = {"type": "step", "step": batch + 1, "batch": batch, "epoch": epoch, "rank": 0}
        record |= {
            "start_ms": float(batch),
            "optimizer_steps": optimizer_steps,
            "comm_bytes": 0,
            "memory_retries": retries,
        }
        records.append(record | {f"{name}_ms": value for name, value in zip(_TIMES, times, strict=True)})
    return Trace(Path("recorded"), {"rank": 0, "world_size": 1, "attempt": 0, "clock": "host"}, tuple(records))


def test_planted_bottlenecks_of_real_fits_are_found() -> None:
    runs = [run for run in read_runs() if run["planted"] != "healthy"]
    confusion = Counter((run["planted"], first_answer([trace_of(run)])) for run in runs)
    # What is missed: spikes and ramps of 16 to 33 % where the machine itself varied by as much.
    assert right_share(confusion) >= 0.94, confusion_table(confusion)
    clear = [run for run in runs if run["share"] >= 0.35]
    assert all(first_answer([trace_of(run)]) == run["planted"] for run in clear)


def test_real_fits_without_a_bottleneck_raise_no_alarm() -> None:
    healthy = [run for run in read_runs() if run["planted"] == "healthy"]
    for run in healthy:
        steps = [dict(zip(_TIMES, step[4:], strict=True)) for step in run["steps"][3:]]
        times = {name: sum(step[name] for step in steps) for name in _TIMES}
        # Adam on a wide layer with few rows takes half of forward and backward, which the diagnosis is to say.
        is_heavy = times["optimizer"] > 0.5 * (times["forward"] + times["backward"])
        assert first_answer([trace_of(run)]) == ("compute" if is_heavy else "healthy"), run["width"]
