"""One side of a comparison, read from the traces of one run or several."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_hpc.report.run_sample import FIGURES, MIN_STEPS, RunSample, reduce_times
from lightning_hpc.trace.reader import Trace, read_trace, trace_files

MAX_RUNS = 100


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
    files = list(dict.fromkeys(file for path in paths for file in trace_files(path)))
    attempts: dict[Path, list[Trace]] = defaultdict(list)
    for file in files:
        attempts[file.parent].append(read_trace(file))
        if len(attempts) > MAX_RUNS:
            raise ValueError(f"there are more than {MAX_RUNS} runs in {', '.join(map(str, paths))}; give fewer of them")
    sizes = {int(trace.header["world_size"]) for traces in attempts.values() for trace in traces}
    if len(sizes) > 1:
        raise ValueError(
            f"the runs in {', '.join(map(str, paths))} are of {sorted(sizes)} ranks; compare those of one"
            " number of ranks"
        )
    runs: list[RunSample] = []
    notes: list[str] = []
    for directory, traces in sorted(attempts.items()):
        _note_missing_ranks(directory, traces, max(sizes), notes)
        steps = min(len(trace.steps) for trace in traces) - skip
        if steps < MIN_STEPS:
            notes.append(f"{directory}: {max(steps, 0)} steps after the first {skip}, of {MIN_STEPS} needed; left out")
        else:
            runs.append(_sample(traces, skip))
    return Side(
        ", ".join(map(str, paths)),
        tuple(sorted(runs, key=lambda run: run.started_at)),
        _environment([trace for traces in attempts.values() for trace in traces], max(sizes)),
        tuple(notes),
    )


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
        started_at=min(float(trace.header["started_at"]) for trace in traces),
        steps=len(total),
        steps_per_second=1e3 * len(total) / max(sum(total), 1e-6),
        times_ms={figure: reduce_times(values) for figure, values in slowest.items()},
        spans_ms=spans,
    )


def _series(trace: Trace) -> dict[str, list[float]]:
    """The steps of one rank, without what was not measured in each of them."""
    series: dict[str, list[float]] = {figure: [] for figure in FIGURES}
    steps = trace.steps
    for step in steps:
        for figure, values in series.items():
            value = step[f"{figure}_ms"]
            if value is not None:
                values.append(float(value))
    return {figure: values for figure, values in series.items() if len(values) == len(steps)}


def _spans(trace: Trace) -> dict[str, float]:
    spans: dict[str, float] = {}
    for span in trace.spans:
        name = span["name"][:40]
        spans[name] = spans.get(name, 0.0) + span["duration_ms"]
    return dict(list(spans.items())[:20])


def _environment(traces: Iterable[Trace], world_size: int) -> dict[str, Any]:
    """Short, whatever the headers hold: it goes into baselines and tables."""
    facts: dict[str, set[str]] = {"hosts": set(), "clocks": set(), "versions": set()}
    for trace in traces:
        facts["hosts"].add(trace.header["host"][:80])
        facts["clocks"].add(trace.header["clock"][:80])
        versions = list(trace.header["versions"].items())[:20]
        facts["versions"].update(f"{name} {version}"[:80] for name, version in versions)
    return {"world_size": world_size, **{name: sorted(values)[:20] for name, values in facts.items()}}
