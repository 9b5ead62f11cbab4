"""Quantiles of steps, with the variance that blocks and runs leave them, and Student's t."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Counts = NDArray[np.int32]

_RESAMPLES = 200
_NORMAL_FROM = 500  # degrees of freedom


@dataclass(frozen=True)
class Estimate:
    """A figure of one side, over all of its runs.

    Attributes:
        log: Natural logarithm of the figure in milliseconds.
        variance: Of `log`: within runs, and between them where there are several.
        freedom: Degrees of freedom of `variance`.
    """

    log: float
    variance: float
    freedom: int


@dataclass(frozen=True)
class Resampled:
    """A quantile of one side in milliseconds, and what it might have been. Those of phases add up.

    Attributes:
        value: The quantile over the pooled steps, in which each run has the same weight.
        within: The same with blocks of each run drawn anew: ``(resamples,)``.
        between: With whole runs drawn anew: ``(resamples,)``.
        runs: Number of runs.
        blocks: Blocks of each.
    """

    value: float
    within: Array
    between: Array
    runs: int
    blocks: int

    def __add__(self, other: "Resampled") -> "Resampled":
        # Both were drawn alike, so what the parts have in common stays.
        value, within, between = self.value + other.value, self.within + other.within, self.between + other.between
        return Resampled(value, within, between, self.runs, self.blocks)

    def estimate(self) -> Estimate:
        """The logarithm with its variance. Blocks keep what consecutive steps have in common.

        Carlstein, Ann. Stat. 14(3), 1986, for blocks; Davison and Hinkley, "Bootstrap methods and their application",
        1997, section 3.8, for drawing whole runs only, since what is within them is in their difference already. A
        bootstrap over n units finds (n - 1)/n of the variance, which is put right. Runs that happen to agree better
        than their own steps let them are not believed.
        """
        within = float(np.var(np.log(self.within), ddof=1)) * self.blocks / (self.blocks - 1)
        if self.runs == 1:
            return Estimate(math.log(self.value), within, self.blocks - 1)
        between = float(np.var(np.log(self.between), ddof=1)) * self.runs / (self.runs - 1)
        return Estimate(math.log(self.value), max(within, between), self.runs - 1)


def resample(samples: Sequence[Array], shares: Sequence[float]) -> list[Resampled]:
    """Quantiles of a figure over all runs. The same samples give the same result.

    Args:
        samples: One ``(blocks, levels)`` float64 array a run, above zero, in milliseconds.
        shares: Which quantiles, each between 0 and 1.
    """
    pooled = np.stack(samples)
    runs, blocks, levels = pooled.shape
    order = np.argsort(pooled, axis=None, kind="stable")
    ordered = pooled.ravel()[order]
    drawn = [np.cumsum(counts[:, order // levels], axis=1, dtype=np.int32) for counts in _draws(runs, blocks)]
    result = []
    for share in shares:
        within, between = (ordered[np.argmax(counts >= share * counts[:, -1:], axis=1)] for counts in drawn)
        result.append(Resampled(float(np.quantile(ordered, share)), within, between, runs, blocks))
    return result


@lru_cache(maxsize=8)
def _draws(runs: int, blocks: int) -> tuple[Counts, Counts]:
    """How often each block is drawn, ``(_RESAMPLES, runs * blocks)``: within each run, and with its whole run."""
    generator = np.random.default_rng(0)
    within = generator.multinomial(blocks, np.full(blocks, 1 / blocks), size=(_RESAMPLES, runs))
    between = generator.multinomial(runs, np.full(runs, 1 / runs), size=_RESAMPLES)
    return within.reshape(_RESAMPLES, -1).astype(np.int32), np.repeat(between, blocks, axis=1).astype(np.int32)


def student_quantile(share: float, freedom: float) -> float:
    """The value that Student's t stays below with probability ``share``, from one half to below 1.

    Between whole degrees of freedom, of which there is one at least, it is interpolated over their reciprocals.
    """
    assert 0.5 <= share < 1, share
    assert freedom >= 1, freedom
    if freedom > _NORMAL_FROM:
        return NormalDist().inv_cdf(share)
    whole = int(freedom)
    lower, upper = _whole_quantile(share, whole), _whole_quantile(share, whole + 1)
    weight = (1 / whole - 1 / freedom) * whole * (whole + 1)
    return lower + weight * (upper - lower)


def _whole_quantile(share: float, freedom: int) -> float:
    low, high = 0.0, 1.0
    while _student_share(high, freedom) < share:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_share(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def _student_share(value: float, freedom: int) -> float:
    """Probability that t is below a value that is not negative: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(value / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2 == 1
    term = cosine if is_odd else 1.0
    total = term if freedom > 1 else 0.0
    for divisor in range(2 + is_odd, freedom - 1, 2):
        term *= cosine**2 * (divisor - 1) / divisor
        total += term
    inside = 2 / math.pi * (angle + sine * total) if is_odd else sine * total
    return 0.5 + inside / 2
