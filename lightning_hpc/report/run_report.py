"""What a run was like, from its traces: figures, series and the diagnosis, as JSON and as a page."""

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_hpc.report.run_series import Curve, Lane, RunSeries, lane_of, series_of
from lightning_hpc.trace.diagnosis import diagnose
from lightning_hpc.trace.finding import Diagnosis
from lightning_hpc.trace.reader import Trace
from lightning_hpc.trace.records import PHASES, Record

SCHEMA = "lightning_hpc.report/1"

_MEMORY_CURVES = (
    *("memory_used_bytes", "memory_limit_bytes", "memory_reserved_bytes", "gpu_used_bytes"),
    *("memory_hit_rate", "memory_fragmentation", "gpu_utilization"),
)
_MOST_CURVES = 8
_MOST_EVENTS = 100


@dataclass(frozen=True)
class Headline:
    """The figures that a run is judged by. None is what nobody has measured.

    Attributes:
        steps: Iterations of a rank.
        optimizer_steps: Optimizer steps.
        step_ms: Median milliseconds of an iteration, over all ranks.
        step_p95_ms: 95th percentile.
        step_p99_ms: 99th percentile.
        samples_per_second: Of all ranks together, in the time of iterations.
        peak_memory_bytes: Most bytes in use on a rank.
        peak_memory_share: Highest part of its limit, 0 to 1.
        gpu_utilization: Mean over time and ranks, 0 to 1.
        comm_share: Exposed communication as a part of the iterations' time, 0 to 1.
        wall_seconds: From the start of the file to its last record.
    """

    steps: int
    optimizer_steps: int
    step_ms: float
    step_p95_ms: float
    step_p99_ms: float
    samples_per_second: float | None
    peak_memory_bytes: float | None
    peak_memory_share: float | None
    gpu_utilization: float | None
    comm_share: float | None
    wall_seconds: float


@dataclass(frozen=True)
class RankSummary:
    """One rank.

    Attributes:
        rank: Which.
        host: Where.
        steps: Its iterations.
        phases_ms: Mean milliseconds of each phase that it has measured.
        lane: The same over time.
    """

    rank: int
    host: str
    steps: int
    phases_ms: dict[str, float]
    lane: Lane


@dataclass(frozen=True)
class Attempt:
    """One start of the run.

    Attributes:
        attempt: Its number.
        started_at: Unix time in seconds.
        steps: Iterations of its first rank.
        wall_seconds: As in `Headline`.
    """

    attempt: int
    started_at: float
    steps: int
    wall_seconds: float


@dataclass(frozen=True)
class RunReport:
    """The last attempt of a run that has trained, and a line for each of the others.

    Attributes:
        attempt: Its number.
        world_size: Ranks of the job.
        missing_ranks: Those that left no trace with a step.
        environment: Hosts, clock, device types and versions, each as a sorted list of texts.
        started_at: Unix time in seconds.
        headline: The figures.
        diagnosis: What slows it down.
        time_s: Seconds of the first rank by what they were spent on: ``training``, then the spans outside others.
        ranks: One for each.
        series: What is drawn over time.
        memory: Curves of `lightning_hpc.trace.records.MEMORY_FIGURES`, by name, of up to eight ranks each.
        decisions: What ``compression="auto"`` has decided.
        events: The last hundred.
        metrics: Last values of what the module logged, if the report was made by the run itself; None for one that is
            infinite or no number, which JSON cannot say.
        attempts: All of them.
    """

    attempt: int
    world_size: int
    missing_ranks: tuple[int, ...]
    environment: dict[str, list[str]]
    started_at: float
    headline: Headline
    diagnosis: Diagnosis
    time_s: dict[str, float]
    ranks: tuple[RankSummary, ...]
    series: RunSeries
    memory: dict[str, tuple[Curve, ...]]
    decisions: tuple[Record, ...]
    events: tuple[Record, ...]
    metrics: dict[str, float | None]
    attempts: tuple[Attempt, ...]

    def to_json(self) -> str:
        """All of it."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=1, allow_nan=False) + "\n"


def report_of(traces: Sequence[Trace], metrics: Mapping[str, float] | None = None) -> RunReport:
    """Makes the report.

    Args:
        traces: Of one run, one a rank and attempt.
        metrics: Last values of what the module logged.

    Raises:
        ValueError: If no trace holds an iteration, or two are of the same rank and attempt.
    """
    diagnosis = diagnose(traces)
    trained = [trace for trace in traces if trace.steps]
    number = max(trace.header["attempt"] for trace in trained)
    last = sorted((trace for trace in trained if trace.header["attempt"] == number), key=_rank)
    first = last[0].header
    present = {_rank(trace) for trace in last}
    return RunReport(
        attempt=number,
        world_size=first["world_size"],
        missing_ranks=tuple(rank for rank in range(min(first["world_size"], 10**6)) if rank not in present),
        environment=_environment(last),
        started_at=float(first["started_at"]),
        headline=_headline(last),
        diagnosis=diagnosis,
        time_s=_time_spent(last[0]),
        ranks=tuple(_summary(trace, len(last)) for trace in last),
        series=series_of(last),
        memory=_memory(last),
        decisions=tuple(record for trace in last for record in trace.decisions),
        events=tuple(sorted((event for trace in last for event in trace.events), key=_moment)[-_MOST_EVENTS:]),
        metrics={name: value if np.isfinite(value) else None for name, value in (metrics or {}).items()},
        attempts=_attempts(traces),
    )


def _rank(trace: Trace) -> int:
    return int(trace.header["rank"])


def _moment(event: Record) -> float:
    return float(event["at_ms"])


def _headline(traces: Sequence[Trace]) -> Headline:
    steps = [step for trace in traces for step in trace.steps]
    total = np.array([step["total_ms"] for step in steps], dtype=np.float64)
    median, p95, p99 = np.percentile(total, [50, 95, 99])
    memory = [record for trace in traces for record in trace.memory]
    used = [record["memory_used_bytes"] for record in memory if record["memory_used_bytes"] is not None]
    shares = [
        record["memory_used_bytes"] / record["memory_limit_bytes"]
        for record in memory
        if record["memory_used_bytes"] is not None and (record["memory_limit_bytes"] or 0) >= 1
    ]
    busy = [record["gpu_utilization"] for record in memory if record["gpu_utilization"] is not None]
    comm = [step["comm_ms"] for step in steps]
    return Headline(
        steps=max(len(trace.steps) for trace in traces),
        optimizer_steps=sum(step["optimizer_steps"] for step in traces[0].steps),
        step_ms=float(median),
        step_p95_ms=float(p95),
        step_p99_ms=float(p99),
        samples_per_second=_throughput(traces),
        peak_memory_bytes=max(used, default=None),
        peak_memory_share=max(shares, default=None),
        gpu_utilization=statistics.fmean(busy) if busy else None,
        comm_share=None if None in comm else float(sum(comm) / max(float(total.sum()), 1e-9)),
        wall_seconds=max(_wall_seconds(trace) for trace in traces),
    )


def _throughput(traces: Sequence[Trace]) -> float | None:
    rates: list[float] = []
    for trace in traces:
        samples = [step["samples"] for step in trace.steps]
        if None in samples:
            return None
        rates.append(sum(samples) / max(sum(step["total_ms"] for step in trace.steps), 1e-9) * 1e3)
    return sum(rates)


def _wall_seconds(trace: Trace) -> float:
    ends = [span["start_ms"] + span["duration_ms"] for span in trace.spans]
    ends += [step["start_ms"] + step["total_ms"] for step in trace.steps[-1:]]
    return max(ends, default=0.0) / 1e3


def _time_spent(trace: Trace) -> dict[str, float]:
    spent = {"training": sum(step["total_ms"] for step in trace.steps) / 1e3}
    for span in trace.spans:
        if span["parent"] is None:
            spent[str(span["name"])] = spent.get(str(span["name"]), 0.0) + span["duration_ms"] / 1e3
    return spent


def _summary(trace: Trace, ranks: int) -> RankSummary:
    steps = trace.steps
    values = {phase: [step[f"{phase}_ms"] for step in steps] for phase in PHASES}
    means = {phase: statistics.fmean(each) for phase, each in values.items() if None not in each}
    return RankSummary(_rank(trace), str(trace.header["host"]), len(steps), means, lane_of(trace, ranks))


def _environment(traces: Sequence[Trace]) -> dict[str, list[str]]:
    headers = [trace.header for trace in traces]
    facts = {
        "hosts": {str(header["host"]) for header in headers},
        "devices": {str(header["device_type"]) for header in headers},
        "clocks": {str(header["clock"]) for header in headers},
        "versions": {f"{name} {version}" for header in headers for name, version in dict(header["versions"]).items()},
    }
    return {name: sorted(values) for name, values in facts.items()}


def _memory(traces: Sequence[Trace]) -> dict[str, tuple[Curve, ...]]:
    curves: dict[str, tuple[Curve, ...]] = {}
    for figure in _MEMORY_CURVES:
        of_ranks = [
            Curve.of(
                f"rank {_rank(trace)}",
                [record["at_ms"] / 1e3 for record in trace.memory],
                [record[figure] for record in trace.memory],
            )
            for trace in traces[:_MOST_CURVES]
        ]
        present = tuple(curve for curve in of_ranks if curve is not None)
        if present:
            curves[figure] = present
    return curves


def _attempts(traces: Sequence[Trace]) -> tuple[Attempt, ...]:
    firsts: dict[int, Trace] = {}
    for trace in sorted(traces, key=_rank):
        firsts.setdefault(int(trace.header["attempt"]), trace)
    return tuple(
        Attempt(number, float(trace.header["started_at"]), len(trace.steps), _wall_seconds(trace))
        for number, trace in sorted(firsts.items())
    )
