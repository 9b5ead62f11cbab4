"""Baselines: runs reduced to a small file of JSON that a repository keeps and later runs are compared with."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from lightning_hpc.report.run_sample import BLOCKS, FIGURES, LEVELS, RunSample
from lightning_hpc.report.side import Side
from lightning_hpc.report.whole_file import write_whole
from lightning_hpc.trace import TraceFileError

SCHEMA_NAME = "lightning_hpc.baseline"
SCHEMA_VERSION = 1

MAX_BASELINE_RUNS = 8
"""So that a file stays below 100 KB."""

_MAX_FILE_BYTES = 1_000_000
_DIGITS = 4
_WAY_OUT = "make it again with lightning-hpc compare --save-baseline"


def save_baseline(path: Path, side: Side, skip: int) -> None:
    """Writes a baseline.

    ``median_run`` shows the figures of the run with the median of the median steps, for readers; comparisons use
    ``runs``, which has `LEVELS` order statistics of each of `BLOCKS` blocks of steps, in milliseconds.

    Raises:
        ValueError: If there is no run, or more than `MAX_BASELINE_RUNS`.
        OSError: If the file cannot be written.
    """
    if not side.runs:
        raise ValueError(f"no run of {side.name} is long enough for a baseline: {'; '.join(side.notes)}")
    if len(side.runs) > MAX_BASELINE_RUNS:
        raise ValueError(f"{len(side.runs)} runs are more than the {MAX_BASELINE_RUNS} of a baseline; give fewer")
    middle = sorted(side.runs, key=lambda run: run.median_ms("total"))[len(side.runs) // 2]
    content = {
        "schema": f"{SCHEMA_NAME}/{SCHEMA_VERSION}",
        "skip": skip,
        "environment": dict(side.environment),
        "median_run": {
            "steps_per_second": _round(middle.steps_per_second),
            **{f"{figure}_ms": _round(middle.median_ms(figure)) for figure in middle.times_ms},
        },
    }
    # One line a run: readable differences between two versions of the file, and errors that name a line.
    head = json.dumps(content, indent=1)[:-2]
    runs = ",\n".join(json.dumps(_run(run), separators=(",", ":"), allow_nan=False) for run in side.runs)
    write_whole(path, f'{head},\n "runs": [\n{runs}\n]}}\n')


def read_baseline(path: Path) -> tuple[Side, int]:
    """Reads a baseline.

    Returns:
        Its runs, and how many of their first steps did not count.

    Raises:
        TraceFileError: If the file is empty, foreign, cut off, damaged or of a newer schema.
        OSError: If it cannot be read.
    """
    size = path.stat().st_size
    if size > _MAX_FILE_BYTES:
        raise TraceFileError(path, 1, f"{size:,} bytes are too many for a baseline", _WAY_OUT)
    text = path.read_bytes()
    content = _parse(path, text)
    _check_schema(path, content)
    first = 1 + next((number for number, line in enumerate(text.split(b"\n")) if b'"runs"' in line), 0)
    try:
        skip, environment, runs = content["skip"], content["environment"], content["runs"]
        if type(skip) is not int or not 0 <= skip < 10**9 or not 1 <= len(runs) <= MAX_BASELINE_RUNS:
            raise ValueError("skip or runs are not as they must be")
        facts = _environment(environment)
    except (KeyError, TypeError, ValueError) as error:
        raise TraceFileError(path, 1, f"the baseline is damaged ({error!r:.100})", _WAY_OUT) from None
    samples = tuple(_sample(path, first + number, run) for number, run in enumerate(runs, start=1))
    return Side(str(path), samples, facts), skip


def _run(run: RunSample) -> dict[str, Any]:
    return {
        "started_at": round(run.started_at, 3),
        "steps": run.steps,
        "steps_per_second": _round(run.steps_per_second),
        "spans_ms": {name: _round(value) for name, value in run.spans_ms.items()},
        "times_ms": {
            figure: [[_round(value) for value in block] for block in values.tolist()]
            for figure, values in run.times_ms.items()
        },
    }


def _round(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _parse(path: Path, text: bytes) -> Any:
    if not text.strip():
        raise TraceFileError(path, 1, "the file is empty", _WAY_OUT)
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise TraceFileError(path, error.lineno, f"the file is not JSON, or cut off ({error.msg})", _WAY_OUT) from None
    except (ValueError, RecursionError) as error:
        raise TraceFileError(path, 1, f"the file is not JSON ({type(error).__name__})", _WAY_OUT) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _check_schema(path: Path, content: Any) -> None:
    schema = str(content.get("schema")) if isinstance(content, dict) else ""
    name, _, version = schema.partition("/")
    if name != SCHEMA_NAME or not version.isdecimal():
        raise TraceFileError(path, 1, f"the file is no {SCHEMA_NAME}", "give one of compare --save-baseline")
    if version != str(SCHEMA_VERSION):
        raise TraceFileError(
            path,
            1,
            f"schema {schema[:60]!r} is not {SCHEMA_NAME}/{SCHEMA_VERSION}, but a newer one",
            "upgrade lightning-hpc to read it",
        )


def _environment(content: Mapping[str, Any]) -> dict[str, Any]:
    world_size = content["world_size"]
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"world_size is {world_size!r:.40}")
    lists = {name: [str(value)[:80] for value in content[name]][:20] for name in ("hosts", "clocks", "versions")}
    return {"world_size": world_size, **lists}


def _sample(path: Path, line: int, content: Mapping[str, Any]) -> RunSample:
    try:
        times = {figure: _times(content["times_ms"][figure]) for figure in FIGURES if figure in content["times_ms"]}
        if "total" not in times:
            raise ValueError("there is no total")
        spans = list(content["spans_ms"].items())[:20]
        return RunSample(
            _number(content["started_at"]),
            int(_number(content["steps"])),
            _number(content["steps_per_second"]),
            times,
            {name[:40]: _number(value) for name, value in spans},
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TraceFileError(path, line, f"the run is damaged ({error!r:.100})", _WAY_OUT) from None


def _times(blocks: Any) -> NDArray[np.float64]:
    values = [[_number(value) for value in block] for block in blocks]
    if len(values) != BLOCKS or any(len(block) != LEVELS for block in values):
        raise ValueError(f"not {BLOCKS} blocks of {LEVELS} times")
    return np.maximum(np.array(values, dtype=np.float64), 1e-6)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise ValueError(f"{str(value)[:40]!r} is no number of this kind")
    assert math.isfinite(value)
    return float(value)
