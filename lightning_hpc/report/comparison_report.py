"""A comparison in words: the verdict, a table, what to keep in mind; as Markdown for pull requests, and as JSON."""

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_hpc.report.comparison import Comparison, FigureComparison, Look, Verdict
from lightning_hpc.report.run_sample import RunSample
from lightning_hpc.report.side import Side

SCHEMA = "lightning_hpc.comparison/1"
COLUMNS = ("", "base", "new", "change", "interval", "of the step", "verdict")

_INFORMATION = "for information"
# Of the time that the steps of a run take.
_GROWN_SPAN = 0.1


@dataclass(frozen=True)
class ComparisonReport:
    """What there is to say.

    Attributes:
        comparison: The figures and verdicts.
        base: What was compared with.
        new: What was compared.
    """

    comparison: Comparison
    base: Side
    new: Side

    @property
    def headline(self) -> str:
        """The verdict in one sentence."""
        verdict = self._verdict()
        grown = self._grown_spans()
        return f"{verdict}; not judged, but grown: {', '.join(grown)}" if grown else verdict

    def _verdict(self) -> str:
        total, phases = self.comparison.total, self.comparison.regressed_phases
        if total.verdict is Verdict.SHORT:
            return f"{Verdict.SHORT.value}: no run on one side is long enough"
        if self.comparison.is_regression:
            growth = _growths([total] if total.verdict is Verdict.REGRESSION else phases)
            phases = phases if total.verdict is Verdict.REGRESSION else []
            return f"regression: {growth}" + (f"; {_growths(phases)}" if phases else "")
        if total.verdict is Verdict.NOISY:
            visible = min(look.resolution for look in _looks(total))
            return (
                f"{Verdict.NOISY.value}: only a growth of {visible:.1%} would have stood out; more runs, or longer ones"
            )
        return f"{total.verdict.value}: {_growths([total])}"

    @property
    def rows(self) -> list[Sequence[str]]:
        """The table, with `COLUMNS`: the step twice, its phases, then what is for information."""
        rows: list[Sequence[str]] = []
        total = self.comparison.total
        if total.median is not None and total.undisturbed is not None:
            rows.append(_row("step, median", total.median, "", total.verdict.value))
            rows.append(_row("step, undisturbed", total.undisturbed, "", ""))
        rows += [_phase_row(phase) for phase in self.comparison.phases]
        return rows + list(self._information())

    @property
    def warnings(self) -> list[str]:
        """What speaks against comparing these runs at all."""
        base, new = self.base.environment, self.new.environment
        differences = [
            f"{name} differ: {', '.join(base[name])} and {', '.join(new[name])}"
            for name in ("hosts", "clocks", "versions")
            if base[name] != new[name]
        ]
        return [*differences, *self.base.notes, *self.new.notes]

    @property
    def notes(self) -> list[str]:
        """How to read it."""
        settings = self.comparison.settings
        counts = f"{_count(self.base.runs)} as base, {_count(self.new.runs)} as new"
        notes = [
            f"{counts}; intervals of the ratio at {100 * settings.confidence:g} %, those of the phases together;"
            f" a growth counts from {100 * settings.threshold:g} % of the step on.",
            "Undisturbed: the 10th percentile, for the step the sum of its phases'; neighbours touch that least.",
        ]
        if len(self.base.runs) == len(self.new.runs) == 1:
            notes.append(
                "One run each: a run that is slower from end to end, because of where and when it ran, looks like a"
                " regression. Several runs on each side, in turns, tell them apart."
            )
        elif not self.comparison.is_interleaved:
            notes.append(
                "The runs did not take turns, so a change of the machine between them looks like one of the program;"
                " the intervals allow for as much of it as the noise within the runs suggests."
            )
        if self.comparison.left_out and self.comparison.phases:
            notes.append(f"Not measured in all runs, and left out: {', '.join(self.comparison.left_out)}.")
        return notes

    def to_markdown(self) -> str:
        """For a pull request: the verdict, then the table, then the rest folded away."""
        verdict, _, rest = self.headline.partition(": ")
        lines = [f"**lightning-hpc compare: {verdict}**: {rest}", ""]
        if self.rows:
            lines += [_cells(COLUMNS), "|---|--:|--:|--:|--:|--:|---|", *map(_cells, self.rows), ""]
        lines += [f"- Warning: {_code(warning)}" for warning in self.warnings]
        lines += [f"- {note}" for note in self.notes]
        lines.append(f"- Base {_code(self.base.name)}, new {_code(self.new.name)}.")
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """All figures. Durations are in milliseconds."""
        comparison = self.comparison
        content = {
            "schema": SCHEMA,
            "is_regression": comparison.is_regression,
            "headline": self.headline,
            "settings": asdict(comparison.settings),
            "is_interleaved": comparison.is_interleaved,
            "total": _figure(comparison.total),
            "phases": {phase.figure: _figure(phase) for phase in comparison.phases},
            "left_out": list(comparison.left_out),
            "base": _side(self.base),
            "new": _side(self.new),
            "warnings": self.warnings,
        }
        return json.dumps(content, indent=2) + "\n"

    def _grown_spans(self) -> list[str]:
        """Spans outside steps, such as checkpoints, that have grown by much of a run's time."""
        if not self.base.runs or not self.new.runs:
            return []
        names = dict.fromkeys(name for side in (self.base, self.new) for run in side.runs for name in run.spans_ms)
        run_ms = statistics.median(1e3 * run.steps / run.steps_per_second for run in self.base.runs)
        spans = [(name, _span(self.base.runs, name), _span(self.new.runs, name)) for name in names]
        return [
            f"{name} ({before:.4g} to {after:.4g} ms a run)"
            for name, before, after in spans
            if after - before > _GROWN_SPAN * run_ms
        ]

    def _information(self) -> Iterator[Sequence[str]]:
        if not self.base.runs or not self.new.runs:
            return
        old, recent = (_throughput(side.runs) for side in (self.base, self.new))
        change = f"{recent / old - 1:+.1%}"
        yield ("steps/s, median run", f"{old:.4g}", f"{recent:.4g}", change, "", "", _INFORMATION)
        spans = dict.fromkeys(name for side in (self.base, self.new) for run in side.runs for name in run.spans_ms)
        for name in spans:
            before, after = (_span(side.runs, name) for side in (self.base, self.new))
            change = f"{after / before - 1:+.1%}" if before > 0 else ""
            yield (f"{name}, a run", f"{before:.4g} ms", f"{after:.4g} ms", change, "", "", _INFORMATION)


def _row(name: str, look: Look, share: str, verdict: str) -> Sequence[str]:
    interval = f"{look.low - 1:+.1%} to {look.high - 1:+.1%}" if look.high < 10 else "wide"
    change = f"{look.ratio - 1:+.1%}" if look.ratio < 10 else f"{look.ratio:.3g} x"
    return (name, _milliseconds(look.base_ms), _milliseconds(look.new_ms), change, interval, share, verdict)


def _milliseconds(value: float) -> str:
    return f"{value:.4g} ms" if value > 1e-5 else "0 ms"  # what is 0 is kept as a nanosecond


def _phase_row(phase: FigureComparison) -> Sequence[str]:
    assert phase.median is not None
    assert phase.share_of_step is not None
    look = _telling_look(phase)
    name = phase.figure if look is phase.median else f"{phase.figure}, undisturbed"
    return _row(name, look, f"{phase.share_of_step:+.1%}" if look is phase.median else "", phase.verdict.value)


def _telling_look(figure: FigureComparison) -> Look:
    """The look that the verdict comes from: the median, unless its interval says nothing and the other's does."""
    assert figure.median is not None
    assert figure.undisturbed is not None
    if figure.verdict not in (Verdict.REGRESSION, Verdict.IMPROVEMENT):
        return figure.median
    return figure.median if not figure.median.low <= 1 <= figure.median.high else figure.undisturbed


def _growths(figures: Iterable[FigureComparison]) -> str:
    parts = []
    for figure in figures:
        look = _telling_look(figure)
        name = "the step" if figure.figure == "total" else figure.figure
        kind = "median" if look is figure.median else "undisturbed"
        parts.append(
            f"{name} {look.ratio - 1:+.1%} ({look.base_ms:.4g} to {look.new_ms:.4g} ms, {kind};"
            f" {look.low - 1:+.1%} to {look.high - 1:+.1%})"
        )
    return ", ".join(parts)


def _looks(figure: FigureComparison) -> list[Look]:
    return [look for look in (figure.median, figure.undisturbed) if look is not None]


def _count(runs: Sequence[RunSample]) -> str:
    steps = sum(run.steps for run in runs)
    return (
        f"{len(runs)} run{'s' * (len(runs) != 1)} of {steps} steps"
        if len(runs) == 1
        else (f"{len(runs)} runs of {steps} steps in all")
    )


def _throughput(runs: Sequence[RunSample]) -> float:
    return statistics.median(run.steps_per_second for run in runs)


def _span(runs: Sequence[RunSample], name: str) -> float:
    return statistics.median(run.spans_ms.get(name, 0.0) for run in runs)


def _figure(figure: FigureComparison) -> dict[str, Any]:
    looks = {"median": figure.median, "undisturbed": figure.undisturbed}
    shown = {
        name: {**asdict(look), "ratio": look.ratio, "resolution": look.resolution}
        for name, look in looks.items()
        if look is not None
    }
    return {"verdict": figure.verdict.value, "share_of_step": figure.share_of_step, **shown}


def _side(side: Side) -> dict[str, Any]:
    runs = [
        {
            "started_at": run.started_at,
            "steps": run.steps,
            "steps_per_second": run.steps_per_second,
            "median_ms": {figure: run.median_ms(figure) for figure in run.times_ms},
            "spans_ms": dict(run.spans_ms),
        }
        for run in side.runs
    ]
    return {"name": side.name, "environment": dict(side.environment), "runs": runs}


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _plain(text: str) -> str:
    """Text that Markdown takes as it is: names of spans come from files."""
    return "".join(f"\\{letter}" if letter in r"\`*_{}[]<>#|~@&!" else letter for letter in " ".join(text.split()))


def _code(text: str) -> str:
    """A code span, in which GitHub neither links, mentions nor renders anything."""
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"
