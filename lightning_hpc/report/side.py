"""One side of a comparison, read from the traces of one run or several."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_hpc.report.run_sample import FIGURES, MIN_STEPS, RunSample, reduce_times
from lightning_hpc.trace import Trace, TraceFileError, read_trace

MAX_RUNS = 100
_MAX_FILE_BYTES = 2**30
_DAMAGED = "the file was changed or damaged after it was written; compare without it"


@dataclass(frozen=True)
class Side:
    """Runs that count as equal.

    Attributes:
        name: What the user called it.
        runs: Those that are long enough, by time.
        environment: What they ran on: ``world_size``, and sorted lists of ``hosts``, ``clocks`` and ``versions``.
        notes: What was left out, and why.
    """

    name: str
    runs: tuple[RunSample, ...]
    environment: Mapping[str, Any]
    notes: tuple[str, ...] = field(default=())


def read_side(paths: Sequence[str | Path], skip: int) -> Side:
    """Reads all runs below some directories; an attempt of `StepTrace`, resumed or not, is a run.

    Of several ranks, the one with the largest median counts, for each figure by itself: a step lasts as long as on
    its slowest rank.

    Args:
        paths: Directories, or files of single ranks.
        skip: First steps of each run that do not count, since caches and buffers are still cold.

    Raises:
        OSError: If a file cannot be read, or there is none.
        TraceFileError: If one is no whole trace of this schema, or holds what is no duration.
        ValueError: If the runs are of different numbers of ranks, or too many.
    """
    files = list(dict.fromkeys(file for path in paths for file in _trace_files(Path(path))))
    attempts: dict[Path, list[Trace]] = defaultdict(list)
    for file in files:
        attempts[file.parent].append(_read(file))
        if len(attempts) > MAX_RUNS:
            raise ValueError(f"there are more than {MAX_RUNS} runs in {', '.join(map(str, paths))}; give fewer of them")
    sizes = {_number(trace, "world_size") for traces in attempts.values() for trace in traces}
    if len(sizes) > 1:
        raise ValueError(
            f"the runs in {', '.join(map(str, paths))} are of {sorted(map(int, sizes))} ranks; compare those of one"
            " number of ranks"
        )
    runs: list[RunSample] = []
    notes: list[str] = []
    for directory, traces in sorted(attempts.items()):
        _note_missing_ranks(directory, traces, int(max(sizes)), notes)
        steps = min(len(trace.steps) for trace in traces) - skip
        if steps < MIN_STEPS:
            notes.append(f"{directory}: {max(steps, 0)} steps after the first {skip}, of {MIN_STEPS} needed; left out")
        else:
            runs.append(_sample(traces, skip))
    return Side(
        ", ".join(map(str, paths)),
        tuple(sorted(runs, key=lambda run: run.started_at)),
        _environment([trace for traces in attempts.values() for trace in traces], int(max(sizes))),
        tuple(notes),
    )


def _trace_files(path: Path) -> list[Path]:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give a directory that StepTrace has written to")
    if not path.is_dir():
        return [path]
    files = sorted(path.rglob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"no *.jsonl file in {path}; give a directory that StepTrace has written to")
    return files


def _read(file: Path) -> Trace:
    size = file.stat().st_size
    if size > _MAX_FILE_BYTES:
        raise TraceFileError(file, 1, f"the file has {size:,} bytes", f"at most {_MAX_FILE_BYTES:,} are read")
    try:
        return read_trace(file)
    except RecursionError:
        raise TraceFileError(file, 1, "a line is nested too deeply to be a record", _DAMAGED) from None


def _note_missing_ranks(directory: Path, traces: Sequence[Trace], world_size: int, notes: list[str]) -> None:
    if len(traces) < world_size:
        notes.append(f"{directory}: files of {len(traces)} of {world_size} ranks; the slowest may be missing")


def _sample(traces: Sequence[Trace], skip: int) -> RunSample:
    series: dict[str, list[list[float]]] = {figure: [] for figure in FIGURES}
    spans: dict[str, float] = {}
    for trace in traces:
        for figure, values in _series(trace).items():
            series[figure].append(values[skip:])
        for name, duration in _spans(trace).items():
            spans[name] = max(duration, spans.get(name, 0.0))
    # A figure that one rank has not measured is not known for the slowest.
    slowest = {
        figure: max(ranks, key=statistics.median) for figure, ranks in series.items() if len(ranks) == len(traces)
    }
    total = slowest["total"]
    return RunSample(
        started_at=min(_number(trace, "started_at") for trace in traces),
        steps=len(total),
        steps_per_second=1e3 * len(total) / max(sum(total), 1e-6),
        times_ms={figure: reduce_times(values) for figure, values in slowest.items()},
        spans_ms=spans,
    )


def _series(trace: Trace) -> dict[str, list[float]]:
    """The steps of one rank, without what was not measured in each of them."""
    series: dict[str, list[float]] = {figure: [] for figure in FIGURES}
    steps = 0
    for line, record in enumerate(trace.records, start=2):
        if record["type"] != "step":
            continue
        steps += 1
        for figure, values in series.items():
            value = record[f"{figure}_ms"]
            if value is not None or figure == "total":
                values.append(_duration(trace, line, f"{figure}_ms", value))
    return {figure: values for figure, values in series.items() if len(values) == steps}


def _spans(trace: Trace) -> dict[str, float]:
    spans: dict[str, float] = {}
    for line, record in enumerate(trace.records, start=2):
        if record["type"] == "span":
            duration = _duration(trace, line, "duration_ms", record["duration_ms"])
            spans[str(record["name"])[:40]] = spans.get(str(record["name"])[:40], 0.0) + duration
    return dict(list(spans.items())[:20])


def _duration(trace: Trace, line: int, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise TraceFileError(trace.path, line, f"{key} is {str(value)[:40]!r}, which is no duration", _DAMAGED)
    return float(value)


def _number(trace: Trace, key: str) -> float:
    value = trace.header[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise TraceFileError(trace.path, 1, f"{key} of the header is {str(value)[:40]!r}, which is no number", _DAMAGED)
    return float(value)


def _environment(traces: Iterable[Trace], world_size: int) -> dict[str, Any]:
    """Short, whatever the headers hold: it goes into baselines and tables."""
    facts: dict[str, set[str]] = {"hosts": set(), "clocks": set(), "versions": set()}
    for trace in traces:
        facts["hosts"].add(str(trace.header["host"])[:80])
        facts["clocks"].add(str(trace.header["clock"])[:80])
        versions = trace.header["versions"]
        pairs = versions.items() if isinstance(versions, dict) else ()
        facts["versions"].update(f"{name} {version}"[:80] for name, version in list(pairs)[:20])
    return {"world_size": world_size, **{name: sorted(values)[:20] for name, values in facts.items()}}
