"""The number of samples in a batch, as far as it can be told at a glance."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def count_samples(batch: Any) -> int | None:
    """Length of the first dimension of a batch's first tensor, looked for along the first entries of its collections.

    Lightning's own `extract_batch_size` visits every tensor of a batch, which is too slow for each iteration.

    Args:
        batch: Any nesting of tensors, mappings and sequences.

    Returns:
        None where the first entry is no tensor, or one without dimensions.
    """
    while not isinstance(batch, Tensor):
        if isinstance(batch, Mapping):
            batch = next(iter(batch.values()), None)
        elif isinstance(batch, list | tuple) and batch:
            batch = batch[0]
        else:
            return None
    return len(batch) if batch.ndim else None
