"""How many workers a loader needs."""

import os
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

from torch.utils.data import IterableDataset

from lightning_hpc.data.seeding import KeptGenerators

_WORTH_A_WORKER_S = 5e-4
"""What a batch must take to make: below, handing it from process to process costs as much."""

_MOST_WORKERS = 8
_TRIAL_BATCHES = 4


def choose_num_workers(read: Callable[[int], Any], dataset: Any) -> int:
    """Reads some batches with one worker, and says how many workers are worth having.

    None if batches are cheap, where workers would only cost (Lightning#17410). Otherwise as many as there are
    processors to spare, up to 8; of an iterable dataset one, since nothing tells whether it gives each worker another
    part.

    Args:
        read: Gives an iterator over so many batches, which one worker makes.
        dataset: What is read.
    """
    with KeptGenerators():  # a seed is drawn, which the training must not notice
        batches = iter(read(_TRIAL_BATCHES))
        times_s = [time.perf_counter() for _ in batches]  # the first one with the start of the worker
    took_s = [after - before for before, after in pairwise(times_s)]
    if not took_s or median(took_s) < _WORTH_A_WORKER_S:
        return 0
    return 1 if isinstance(dataset, IterableDataset) else min(spare_processors(), _MOST_WORKERS)


def spare_processors(ranks: int = 1) -> int:
    """Processors for the workers of one rank, at least 1.

    Args:
        ranks: Ranks that share this machine.
    """
    return max(len(os.sched_getaffinity(0)) // ranks - 1, 1)
