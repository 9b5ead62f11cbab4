"""Lengths of sequences as real data has them, for the tests of batches by tokens."""

import numpy as np
import numpy.typing as npt

MEDIAN = 200


def log_normal(count: int, sigma: float, longest: int, seed: int = 1) -> npt.NDArray[np.int64]:
    lengths = np.exp(np.random.default_rng(seed).normal(np.log(MEDIAN), sigma, count)).astype(np.int64)
    return lengths.clip(1, longest)
