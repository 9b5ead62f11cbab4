"""A run's steps and readings as a bounded number of points, so that a million steps fit on a page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_hpc.trace.reader import Trace
from lightning_hpc.trace.records import PHASES

MOST_POINTS = 240
"""Points of a curve; each stands for a stretch of steps, with its lowest and highest value."""

_BINS = 48
# Of a rank's lane, and of all lanes together: a job of many ranks has coarser ones.
_MOST_LANE_POINTS = 60
_MOST_POINTS_OF_LANES = 1500

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """A figure over time, one point a stretch of steps. Gaps are None.

    Attributes:
        name: What it is.
        times_s: Seconds since the start of the attempt.
        low: The lowest value of each stretch.
        middle: The median.
        high: The highest.
    """

    name: str
    times_s: tuple[float, ...]
    low: tuple[float | None, ...]
    middle: tuple[float | None, ...]
    high: tuple[float | None, ...]

    @classmethod
    def of(cls, name: str, times_s: Sequence[float], values: Sequence[float | None]) -> "Curve | None":
        """The curve of single values; None where there is no value at all."""
        numbers = np.array(values, dtype=np.float64)  # None becomes NaN
        if not len(numbers) or np.isnan(numbers).all():
            return None
        stretches = [stretch for stretch in np.array_split(np.arange(len(numbers)), MOST_POINTS) if len(stretch)]
        parts = [numbers[stretch][~np.isnan(numbers[stretch])] for stretch in stretches]
        times = np.asarray(times_s, dtype=np.float64)
        return cls(
            name,
            tuple(float(times[stretch].mean()) for stretch in stretches),
            *(
                tuple(float(pick(part)) if len(part) else None for part in parts)
                for pick in (np.min, np.median, np.max)
            ),
        )


@dataclass(frozen=True)
class Histogram:
    """How long steps took.

    Attributes:
        edges_ms: Limits of the bins, ascending, one more than there are counts.
        counts: Steps in each bin; the last one also holds what is longer.
    """

    edges_ms: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Lane:
    """The phases of one rank over time.

    Attributes:
        times_s: Seconds since the start of the attempt, one for each stretch of steps.
        phases_ms: Mean milliseconds of each phase that the rank has measured, in each stretch.
    """

    times_s: tuple[float, ...]
    phases_ms: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class RunSeries:
    """What is drawn over time.

    Attributes:
        step_ms: The iteration, over all ranks.
        step_histogram: The same as a distribution.
        phases_ms: For each of `PHASES`, its mean milliseconds in each stretch, over all ranks; without those nobody
            has measured.
        phase_times_s: When these stretches were.
        throughput: Samples a second of all ranks together. None where batches did not say.
        comm_bytes: Bytes an iteration that a rank sent. None where nobody counts them.
    """

    step_ms: Curve
    step_histogram: Histogram
    phases_ms: dict[str, tuple[float, ...]]
    phase_times_s: tuple[float, ...]
    throughput: Curve | None
    comm_bytes: Curve | None


def series_of(traces: Sequence[Trace]) -> RunSeries:
    """The series of one attempt.

    Args:
        traces: One a rank, with a step at least in each.
    """
    columns = [_columns(trace) for trace in traces]
    longest = max(len(each["total"]) for each in columns)
    points = min(MOST_POINTS, longest)
    # A rank that ended earlier is in fewer of them.
    stretches = [slice(longest * point // points, longest * (point + 1) // points) for point in range(points)]

    def gathered(name: str, point: int) -> Values:
        return np.concatenate([each[name][stretches[point]] for each in columns])

    times = tuple(float(gathered("start", point).mean()) / 1e3 for point in range(points))
    total = np.concatenate([each["total"] for each in columns])
    return RunSeries(
        step_ms=_curve("step", times, [gathered("total", point) for point in range(points)]),
        step_histogram=_histogram(total),
        phases_ms=_phases(gathered, points),
        phase_times_s=times,
        throughput=_throughput(columns, stretches, times),
        comm_bytes=_optional_curve("bytes", times, [gathered("comm_bytes", point) for point in range(points)]),
    )


def lane_of(trace: Trace, ranks: int) -> Lane:
    """The lane of a rank that has trained.

    Args:
        trace: Its trace.
        ranks: Number of ranks that have one.
    """
    columns = _columns(trace)
    most = max(min(_MOST_LANE_POINTS, _MOST_POINTS_OF_LANES // ranks), 8)
    stretches = [stretch for stretch in np.array_split(np.arange(len(columns["total"])), most) if len(stretch)]
    means = {phase: tuple(float(columns[phase][stretch].mean()) for stretch in stretches) for phase in PHASES}
    return Lane(
        tuple(float(columns["start"][stretch].mean()) / 1e3 for stretch in stretches),
        {phase: values for phase, values in means.items() if not np.isnan(values).any()},
    )


def _columns(trace: Trace) -> dict[str, Values]:
    steps = trace.steps
    keys = {phase: f"{phase}_ms" for phase in (*PHASES, "total", "start")}
    keys |= {"samples": "samples", "comm_bytes": "comm_bytes"}
    return {name: np.array([step[key] for step in steps], dtype=np.float64) for name, key in keys.items()}


def _curve(name: str, times_s: tuple[float, ...], parts: Sequence[Values]) -> Curve:
    picks = (np.min, np.median, np.max)
    return Curve(name, times_s, *(tuple(float(pick(part)) for part in parts) for pick in picks))


def _optional_curve(name: str, times_s: tuple[float, ...], parts: Sequence[Values]) -> Curve | None:
    return None if any(np.isnan(part).any() for part in parts) else _curve(name, times_s, parts)


def _phases(gathered: Callable[[str, int], Values], points: int) -> dict[str, tuple[float, ...]]:
    phases = {}
    for phase in PHASES:
        means = [float(gathered(phase, point).mean()) for point in range(points)]
        if not any(np.isnan(mean) for mean in means):
            phases[phase] = tuple(means)
    return phases


def _throughput(
    columns: Sequence[dict[str, Values]], stretches: Sequence[slice], times_s: tuple[float, ...]
) -> Curve | None:
    """Each rank's samples by its time, added up: samples of a batch, whatever part of an optimizer step it is."""
    if any(np.isnan(each["samples"]).any() for each in columns):
        return None
    rates = np.zeros(len(times_s))
    for each in columns:
        rates += [each["samples"][part].sum() / max(each["total"][part].sum(), 1e-6) * 1e3 for part in stretches]
    return _curve("samples/s", times_s, [np.array([rate]) for rate in rates])


def _histogram(total_ms: Values) -> Histogram:
    """Up to the 99th percentile and half as much; what is longer would leave the rest no room."""
    high = min(float(total_ms.max()), 1.5 * float(np.percentile(total_ms, 99)))
    low = float(total_ms.min())
    edges = np.linspace(low, max(high, low * 1.01 + 1e-6), _BINS + 1)
    counts, _ = np.histogram(np.minimum(total_ms, edges[-1]), edges)
    return Histogram(tuple(map(float, edges)), tuple(map(int, counts)))
