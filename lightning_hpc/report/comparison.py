"""Is a run slower than another one, or is that noise? Steps and phases of two sides, each of one run or several.

Two looks are taken at each figure. One is its median. The other is its 10th percentile, and for the step the sum of its
phases' 10th percentiles: the step that nothing disturbs. A neighbour on the same machine only ever adds time, so it
moves low percentiles least (Chen and Revels, "Robust benchmarking in noisy environments", arXiv:1608.04295), and an
interruption that falls into one phase leaves the others as they are. What only every other step costs is in the median
alone.
``docs/compare.md`` has the formulae, and what the constants were measured with.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from itertools import pairwise
from operator import add

import numpy as np

from lightning_hpc.report.confidence import Estimate, Resampled, resample, student_quantile
from lightning_hpc.report.run_sample import FIGURES, RunSample

_MEDIAN, _LOW = 0.5, 0.1

_CLOSEST_RUNS = 0.005
"""Equal runs are taken to differ by that much, as a standard deviation, even if a few of them happened not to."""

_SINGLE_RUNS = 0.01
"""Where each side has one run, nothing says how equal runs differ: that much, at least."""

_QUIET = 0.06
"""log(90th by 10th percentile of the step) of a run that nothing disturbs, at most."""

_SESSION_SHARE = 0.5
"""Runs that did not take turns: each side may be off by that share of what its log ratio has above `_QUIET`."""

_BLUNT = 0.05
"""Where a growth of that share of the step, or of a larger threshold, could stay unseen, noise is not ruled out."""


class Verdict(str, Enum):
    """What a comparison says about one figure."""

    REGRESSION = "regression"
    IMPROVEMENT = "improvement"
    SAME = "no difference"
    NOISY = "too noisy to tell"
    SHORT = "too few steps to tell"


@dataclass(frozen=True)
class GateSettings:
    """When a difference counts.

    Attributes:
        threshold: Smallest growth of the step that counts, as a share: 0.02 is 2 %.
        confidence: Of the intervals, between 0.5 and 1.

    Raises:
        ValueError: If one of them is outside its bounds.
    """

    threshold: float = 0.02
    confidence: float = 0.99

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 10:
            raise ValueError(f"a threshold of {self.threshold:.3%} is not between 0 % and 1000 %; 2 % is usual")
        if not 0.5 <= self.confidence < 1:
            raise ValueError(f"a confidence of {self.confidence} is not from 0.5 to below 1; 0.99 is usual")


@dataclass(frozen=True)
class Look:
    """A quantile of a figure, or sum of such, on both sides.

    Attributes:
        base_ms: Of the base, in milliseconds.
        new_ms: Of the new side.
        low: Lower end of the interval of ``new_ms / base_ms``.
        high: Upper end.
    """

    base_ms: float
    new_ms: float
    low: float
    high: float

    @property
    def ratio(self) -> float:
        """New by base."""
        return self.new_ms / self.base_ms

    @property
    def growth_ms(self) -> float:
        """New less base."""
        return self.new_ms - self.base_ms

    @property
    def resolution(self) -> float:
        """The smallest growth that would have stood out of the noise, as a share of the base."""
        return self.high / self.ratio - 1


@dataclass(frozen=True)
class FigureComparison:
    """One figure.

    Attributes:
        figure: One of `FIGURES`.
        median: The look at the median step; None if there are too few steps.
        undisturbed: The look at the 10th percentile, for the step at the sum of its phases'; None likewise.
        share_of_step: Growth of the median by the base's median step; None likewise.
        verdict: What that says.
    """

    figure: str
    median: Look | None
    undisturbed: Look | None
    share_of_step: float | None
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    """Two sides.

    Attributes:
        settings: When a difference counts.
        total: The step.
        phases: Its phases that both sides have measured.
        left_out: Those that one of them has not.
        is_interleaved: Whether the runs of the sides took turns.
    """

    settings: GateSettings
    total: FigureComparison
    phases: tuple[FigureComparison, ...]
    left_out: tuple[str, ...]
    is_interleaved: bool

    @property
    def regressed_phases(self) -> list[FigureComparison]:
        """The phases that count: grown by a real share of the step, which does not itself show that nothing grew."""
        cleared = self.total.verdict is Verdict.IMPROVEMENT or (
            self.total.median is not None and self.total.median.high < 1 + self.settings.threshold
        )
        return [] if cleared else [phase for phase in self.phases if phase.verdict is Verdict.REGRESSION]

    @property
    def is_regression(self) -> bool:
        """What a gate must stop."""
        return self.total.verdict is Verdict.REGRESSION or bool(self.regressed_phases)


def compare_runs(
    base: Sequence[RunSample], new: Sequence[RunSample], settings: GateSettings | None = None
) -> Comparison:
    """Compares all figures that both sides have measured in each of their runs.

    The phases share one error: with n of them, each interval is at ``1 - (1 - confidence) / n`` (Bonferroni).

    Args:
        base: Runs to compare with; if none, there are too few steps to tell.
        new: Runs that may be slower; likewise.
        settings: When a difference counts; the defaults if None.
    """
    settings = settings or GateSettings()
    measured = [figure for figure in FIGURES if all(figure in run.times_ms for run in (*base, *new))]
    is_interleaved = _take_turns(base, new)
    if not base or not new:
        total = FigureComparison("total", None, None, None, Verdict.SHORT)
        return Comparison(settings, total, (), tuple(FIGURES[1:]), is_interleaved)
    phases = [figure for figure in measured if figure != "total"]
    session = 0.0 if is_interleaved else _disturbance(base) ** 2 + _disturbance(new) ** 2
    sides = [_quantiles(runs, measured) for runs in (base, new)]
    compared = {}
    for figure in measured:
        error = (1 - settings.confidence) / (1 if figure == "total" else len(phases))
        pairs = zip(*(side[figure] for side in sides), strict=True)
        median, undisturbed = (_look(old, recent, session, error) for old, recent in pairs)
        compared[figure] = median, undisturbed
    step_ms = compared["total"][0].base_ms
    is_single = len(base) == len(new) == 1
    results = [_judge(figure, looks, step_ms, settings, is_single) for figure, looks in compared.items()]
    left_out = tuple(figure for figure in FIGURES if figure not in measured)
    return Comparison(settings, results[0], tuple(results[1:]), left_out, is_interleaved)


def _take_turns(base: Sequence[RunSample], new: Sequence[RunSample]) -> bool:
    """Whether the sides change at least as often as the smaller one has runs, and more than once."""
    runs = sorted([(run.started_at, False) for run in base] + [(run.started_at, True) for run in new])
    changes = sum(before[1] != after[1] for before, after in pairwise(runs))
    return changes >= max(2, min(len(base), len(new)))


def _disturbance(runs: Sequence[RunSample]) -> float:
    """How far the machine may have moved all runs of a side together, as a standard deviation of the logarithm."""
    slow, fast = np.quantile([run.times_ms["total"] for run in runs], (0.9, 0.1))
    return _SESSION_SHARE * max(0.0, math.log(slow / fast) - _QUIET)


def _quantiles(runs: Sequence[RunSample], figures: Sequence[str]) -> dict[str, tuple[Resampled, Resampled]]:
    """Of each figure, the median and what is undisturbed."""
    found = {}
    for figure in figures:
        median, low = resample([run.times_ms[figure] for run in runs], (_MEDIAN, _LOW))
        found[figure] = median, low
    lows = [low for figure, (_, low) in found.items() if figure != "total"]
    if lows:
        found["total"] = found["total"][0], reduce(add, lows)
    return found


def _look(base: Resampled, new: Resampled, session: float, error: float) -> Look:
    counts = base.runs, new.runs
    variances, freedom = _side_variances(base.estimate(), new.estimate(), counts)
    if counts == (1, 1):
        session = max(session, 2 * _SINGLE_RUNS**2)
    variance = sum(variances) + session
    # Welch and Satterthwaite. The session's part is an assumption, which has no degrees of freedom to lose.
    loss = sum(part**2 / count for part, count in zip(variances, freedom, strict=True))
    half = student_quantile(1 - error / 2, max(1.0, variance**2 / loss)) * math.sqrt(variance)
    growth = math.log(new.value / base.value)
    return Look(base.value, new.value, math.exp(growth - half), math.exp(growth + half))


def _side_variances(base: Estimate, new: Estimate, counts: tuple[int, int]) -> tuple[list[float], list[int]]:
    closest = [_CLOSEST_RUNS**2 / count for count in counts]
    variances = [side.variance + least for side, least in zip((base, new), closest, strict=True)]
    freedom = [base.freedom, new.freedom]
    for one, other in ((0, 1), (1, 0)):
        if counts[one] == 1 and counts[other] > 1:  # one run borrows what several say about how runs differ
            variances[one] += counts[other] * variances[other]
            freedom[one] = freedom[other]
    return variances, freedom


def _judge(
    figure: str, looks: tuple[Look, Look], step_ms: float, settings: GateSettings, is_single: bool
) -> FigureComparison:
    least_ms = settings.threshold * step_ms
    slower = [look.low > 1 and look.growth_ms >= least_ms for look in looks]
    faster = [look.high < 1 and -look.growth_ms >= least_ms for look in looks]
    # One run on each side may sit in a burst from end to end: then the whole distribution must have moved.
    are_enough = all if is_single else any
    if are_enough(slower) and not any(look.high < 1 for look in looks):
        verdict = Verdict.REGRESSION
    elif are_enough(faster) and not any(look.low > 1 for look in looks):
        verdict = Verdict.IMPROVEMENT
    elif min(look.resolution * look.base_ms for look in looks) > max(_BLUNT, settings.threshold) * step_ms:
        verdict = Verdict.NOISY
    else:
        verdict = Verdict.SAME
    return FigureComparison(figure, *looks, looks[0].growth_ms / step_ms, verdict)
