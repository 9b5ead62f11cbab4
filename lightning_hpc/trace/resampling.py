"""How sure a share is, from the variation within one run: a block bootstrap.

Steps that follow each other resemble each other, so single steps drawn at random would look surer than they are. Blocks
of consecutive steps keep that resemblance (Künsch 1989, with blocks that wrap round as in Politis and Romano 1992).
"""

import functools
import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from lightning_hpc.trace.step_table import Times

_RESAMPLES = 1000
_MOST_GROUPS = 256  # of a long run; sums over more blocks say nothing new
_SEED = 0


def share_confidence(part: Times, whole: Times, threshold: float) -> float:
    """How often a resampled run has a share of ``threshold`` or more.

    Args:
        part: Milliseconds of each step, of shape (steps,); may be negative.
        whole: Milliseconds of each step, of shape (steps,).
        threshold: A share, 0 to 1.

    Returns:
        A part of the resamples, 0 to 1.
    """
    return float(np.mean(resample(part, whole) >= threshold))


def resample(part: Times, whole: Times) -> Times:
    """Shares of resampled runs, of shape (resamples,). The same for the same arguments."""
    part, whole = _grouped(part), _grouped(whole)
    chosen = _block_indices(len(part))
    return np.asarray(part[chosen].sum(axis=1) / whole[chosen].sum(axis=1))


def is_positive(values: Times, chance: float) -> bool:
    """Whether the mean of ``values``, of shape (steps,), is above zero beyond chance, by Student's test.

    It compares the means of blocks, so it includes what neighbours have in common.

    Args:
        values: Milliseconds.
        chance: How often it may be said of values whose mean is zero, 0 to 1.
    """
    length = _block_length(len(values))
    blocks = len(values) // length
    if blocks < 2:
        return False
    means = values[: blocks * length].reshape(blocks, length).mean(axis=1)
    return bool(means.mean() > _student(1 - chance, blocks - 1) * means.std(ddof=1) / math.sqrt(blocks))


def _student(level: float, freedom: int) -> float:
    """A quantile of Student's distribution, from the normal one's by Cornish and Fisher's expansion."""
    z = NormalDist().inv_cdf(level)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _block_length(steps: int) -> int:
    return max(1, round(math.pow(steps, 1 / 3)))


@functools.lru_cache(maxsize=8)  # a monitor asks for the same number of steps again and again
def _block_indices(steps: int) -> NDArray[np.intp]:
    length = _block_length(steps)
    starts = np.random.default_rng(_SEED).integers(steps, size=(_RESAMPLES, -(-steps // length), 1))
    chosen = (starts + np.arange(length)) % steps
    return np.asarray(chosen.reshape(_RESAMPLES, -1)[:, :steps])


def _grouped(values: Times) -> Times:
    if len(values) <= _MOST_GROUPS:
        return values
    edges = np.linspace(0, len(values), _MOST_GROUPS, endpoint=False).astype(int)
    return np.asarray(np.add.reduceat(values, edges))
