"""Where the time of a run went: its records in a few figures."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_hpc.trace.records import PHASES, Record


@dataclass(frozen=True)
class PhaseSummary:
    """One phase over all iterations. All None where the phase was not measured in each of them.

    Attributes:
        name: One of `PHASES`, or ``total``.
        sum_ms: Milliseconds in all.
        mean_ms: Milliseconds an iteration.
        median_ms: Milliseconds an iteration.
        share: Part of the time of all iterations, 0 to 1.
    """

    name: str
    sum_ms: float | None = None
    mean_ms: float | None = None
    median_ms: float | None = None
    share: float | None = None


@dataclass(frozen=True)
class TraceSummary:
    """One rank's run.

    Attributes:
        steps: Iterations, one a batch.
        optimizer_steps: Optimizer steps.
        step_seconds: Seconds of iterations.
        wall_seconds: Seconds of iterations and spans together.
        phases: One for each of `PHASES`, then ``total``.
    """

    steps: int
    optimizer_steps: int
    step_seconds: float
    wall_seconds: float
    phases: tuple[PhaseSummary, ...]

    def render(self) -> str:
        """A plain text table."""
        lines = [
            f"{self.steps} steps with {self.optimizer_steps} optimizer steps in {self.step_seconds:.1f} s;"
            f" {self.wall_seconds:.1f} s with start, validation and the time between epochs",
            f"{'phase':<14}{'sum':>12}{'mean':>12}{'median':>12}{'share':>8}",
        ]
        for phase in self.phases:
            figures = "".join(f"{_milliseconds(value):>12}" for value in (phase.sum_ms, phase.mean_ms, phase.median_ms))
            share = "n/a" if phase.share is None else f"{phase.share:.1%}"
            lines.append(f"{phase.name:<14}{figures}{share:>8}")
        return "\n".join(lines)


def summarize(records: Iterable[Record]) -> TraceSummary:
    """Sums up the records of one rank, of one attempt or several.

    Raises:
        ValueError: If there is no step among them, or if they are of several ranks, which run side by side.
    """
    records = list(records)
    steps = [record for record in records if record["type"] == "step"]
    if not steps:
        raise ValueError(f"none of the {len(records)} records is a step, so there is nothing to sum up")
    ranks = sorted({record["rank"] for record in records})
    if len(ranks) > 1:
        raise ValueError(f"the records are of ranks {ranks}; sum up those of one rank")
    total_ms = sum(step["total_ms"] for step in steps)
    return TraceSummary(
        steps=len(steps),
        optimizer_steps=sum(step["optimizer_steps"] for step in steps),
        step_seconds=total_ms / 1e3,
        wall_seconds=(total_ms + sum(_outer_spans_ms(records))) / 1e3,
        phases=tuple(_summarize_phase(name, steps, total_ms) for name in (*PHASES, "total")),
    )


def _outer_spans_ms(records: Iterable[Record]) -> Iterable[float]:
    return (record["duration_ms"] for record in records if record["type"] == "span" and record["parent"] is None)


def _summarize_phase(name: str, steps: Sequence[Record], total_ms: float) -> PhaseSummary:
    values = [step[f"{name}_ms"] for step in steps]
    if None in values:
        return PhaseSummary(name)
    sum_ms = float(sum(values))
    share = sum_ms / total_ms if total_ms else None
    return PhaseSummary(name, sum_ms, statistics.fmean(values), statistics.median(values), share)


def _milliseconds(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f} ms"
