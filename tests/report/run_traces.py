"""Synthetic runs as `StepTrace` writes them, with headers and readings of memory."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_hpc.trace import Trace
from lightning_hpc.trace.records import HEADER_KEYS, MEMORY_FIGURES
from tests.trace.synthetic_runs import JOBS, simulate

HOSTILE = '"><script>alert(1)</script>'


def make_traces(job: str = "10 ms", steps: int = 60, *, attempt: int = 0, **planted: Any) -> list[Trace]:
    """A run; ``planted`` goes to `simulate`."""
    return [complete(trace, attempt=attempt) for trace in simulate(JOBS[job], 0, steps=steps, **planted)]


def complete(trace: Trace, **facts: Any) -> Trace:
    """With a whole header."""
    header = dict.fromkeys(HEADER_KEYS, 0) | trace.header
    header |= {
        "schema": "lightning_hpc.trace/1",
        "host": "node",
        "device_type": "cpu",
        "versions": {"torch": "2"},
        **facts,
    }
    return replace(trace, header=header)


def with_records(trace: Trace, *records: dict[str, Any]) -> Trace:
    return replace(trace, records=(*trace.records, *records))


def with_memory(trace: Trace, **figures: float) -> Trace:
    """With a reading after every fifth step."""
    readings = [
        {
            "type": "memory",
            "step": step["step"],
            "epoch": step["epoch"],
            "batch": step["batch"],
            "rank": trace.header["rank"],
            "at_ms": step["start_ms"],
            **dict.fromkeys(MEMORY_FIGURES),
            **figures,
        }
        for step in trace.steps[::5]
    ]
    return with_records(trace, *readings)


def hostile_traces() -> list[Trace]:
    """All names that come from files try to leave their place."""
    event = {"type": "event", "name": HOSTILE, "step": 1, "rank": 0, "at_ms": 1.0, "details": {HOSTILE: HOSTILE}}
    span = {
        "type": "span",
        "name": HOSTILE,
        "parent": None,
        "epoch": 0,
        "rank": 0,
        "start_ms": 0.0,
        "duration_ms": 900.0,
    }
    decision = {"type": "decision", "step": 1, "rank": 0, "choice": HOSTILE, "reason": HOSTILE}
    traces = make_traces("2 ranks")
    facts = {"host": HOSTILE, "device_type": HOSTILE, "versions": {HOSTILE: HOSTILE}}
    return [with_records(complete(trace, **facts), event, span, decision) for trace in traces]


def write_traces(directory: Path, traces: list[Trace]) -> Path:
    """Writes the files, and returns the directory."""
    for trace in traces:
        path = directory / f"attempt_{trace.header['attempt']:03d}" / f"rank_{trace.header['rank']:05d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "".join(f"{json.dumps(line)}\n" for line in ({"type": "header", **trace.header}, *trace.records))
        )
    return directory
