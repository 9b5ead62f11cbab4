"""Reads batches in the trainer's own process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_hpc.data.fetching import BatchSource, ExhaustedError, IterableFetcher, MapFetcher


@dataclass
class EpochPlan:
    """What an epoch consists of.

    Attributes:
        indices: What the sampler gives, for each batch in order.
        seed: For what is random in samples.
        dataset_epoch: What the dataset is told; None if it takes no epoch.
        guess_next: Asked once, when the indices are at their end, for the epoch that will probably follow.
    """

    indices: Iterator[Any]
    seed: int
    dataset_epoch: int | None = None
    guess_next: "Callable[[], EpochPlan | None] | None" = None


class LocalReader:
    """The batches of one epoch, without workers.

    Args:
        source: Where they come from.
        plan: The epoch.
    """

    def __init__(self, source: BatchSource, plan: EpochPlan) -> None:
        self._plan = plan
        self._fetch: Callable[[Any], Any]
        if source.is_iterable:
            self._fetch = IterableFetcher(source, source.collate_fn)
        else:
            # What samples draw is theirs; the generators of the training go on as if nothing was drawn.
            self._fetch = partial(MapFetcher(source, source.collate_fn, keeps_generators=True), seed=plan.seed)

    def next(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: If the epoch is over.
        """
        try:
            return self._fetch(next(self._plan.indices))
        except ExhaustedError:
            raise StopIteration from None
