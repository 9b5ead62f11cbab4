"""What a comparison keeps of a run: for each figure, a few order statistics of consecutive blocks of its steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FIGURES = ("total", "data_prep", "h2d", "schedule", "forward", "backward", "comm", "optimizer")
"""What is compared: the step, then its phases."""

BLOCKS = 20
"""Consecutive blocks of steps, so that what the noise has in common over neighbouring steps stays together."""

LEVELS = 10
"""Order statistics of a block: its 5th, 15th, …, 95th percentiles, each standing for as many of its steps."""

MIN_STEPS = 5 * BLOCKS
"""A run with fewer steps is too short to say anything about."""


@dataclass(frozen=True)
class RunSample:
    """One run, reduced.

    Attributes:
        started_at: Unix time in seconds.
        steps: Iterations that were counted.
        steps_per_second: Iterations by their time; outliers and all.
        times_ms: For each of `FIGURES` that was measured, ``(BLOCKS, LEVELS)`` float64 in milliseconds, above zero.
        spans_ms: Milliseconds of each kind of time outside iterations.
    """

    started_at: float
    steps: int
    steps_per_second: float
    times_ms: Mapping[str, NDArray[np.float64]]
    spans_ms: Mapping[str, float]

    def median_ms(self, figure: str) -> float:
        """The median step of the run."""
        return float(np.median(self.times_ms[figure]))


def reduce_times(times_ms: Sequence[float]) -> NDArray[np.float64]:
    """``(BLOCKS, LEVELS)`` order statistics of a series of at least `MIN_STEPS` durations.

    Values below a nanosecond become one, since ratios are taken.
    """
    assert len(times_ms) >= MIN_STEPS, len(times_ms)
    blocks = np.array_split(np.asarray(times_ms, dtype=np.float64), BLOCKS)
    levels = (np.arange(LEVELS) + 0.5) / LEVELS
    return np.maximum([np.quantile(block, levels) for block in blocks], 1e-6)
