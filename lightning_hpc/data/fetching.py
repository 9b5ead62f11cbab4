"""Reads samples from a dataset and makes a batch of them, in a worker or in the trainer's process."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import Any

from torch.utils.data import IterableDataset

from lightning_hpc.data.seeding import GeneratorStates, KeptGenerators, seed_all, seed_for


class ExhaustedError(Exception):
    """An iterable dataset has no batch left; a `StopIteration` would end whatever generator it passes."""


@dataclass(frozen=True)
class BatchSource:
    """Where batches come from; what a worker process is given.

    Attributes:
        dataset: Map-style or iterable.
        collate_fn: Makes a batch of samples, or converts a single one.
        auto_collation: Whether there are several samples in a batch.
        drop_last: Whether an iterable dataset's last batch is dropped if it is not full.
        transform: What is made of each sample before it is collated; None leaves it as it is.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any]
    auto_collation: bool
    drop_last: bool
    transform: Callable[[Any], Any] | None = None

    @property
    def is_iterable(self) -> bool:
        """Whether the dataset decides what comes next."""
        return isinstance(self.dataset, IterableDataset)


class MapFetcher:
    """Batches of a map-style dataset.

    Before each sample the generators are seeded by (seed of the epoch, index), so that a randomly augmented sample is
    the same in whichever process and order it is read; by the first index of a batch where the dataset reads whole
    batches. Seeding takes longer than reading some samples do. So it begins with the first batch that turns out to have
    drawn something, which is then read again.

    Args:
        source: Where they come from.
        collate: Makes the batch.
        restart: Called before a batch is made again.
        keeps_generators: Whether the generators are left as they were.
    """

    def __init__(
        self,
        source: BatchSource,
        collate: Callable[[Any], Any],
        restart: Callable[[], None] = lambda: None,
        keeps_generators: bool = False,
    ) -> None:
        self._collate, self._restart = collate, restart
        self._auto_collation = source.auto_collation
        self._get: Callable[[Any], Any] = partial(getitem, source.dataset)
        self._get_all: Callable[[Any], Any] | None = getattr(source.dataset, "__getitems__", None)
        if source.transform is not None:
            self._get = partial(_get_transformed, self._get, source.transform)
            self._get_all = self._get_all and partial(_get_all_transformed, self._get_all, source.transform)
        self._is_seeded = False
        self._states: GeneratorStates | None = None
        self._keeper = KeptGenerators() if keeps_generators else nullcontext()

    def __call__(self, index: Any, seed: int) -> Any:
        """The batch of one index, or of several.

        Args:
            index: What the sampler gave.
            seed: Of the epoch.
        """
        if not self._is_seeded:
            states = self._states = GeneratorStates(self._states)
            try:
                batch = self._fetch(index, None)
            except Exception:
                if not states.have_changed():
                    raise
            else:
                if not states.have_changed():
                    return batch
            states.restore()
            self._is_seeded = True
            self._restart()
        with self._keeper:
            return self._fetch(index, seed)

    def _fetch(self, index: Any, seed: int | None) -> Any:
        """A batch, seeded unless ``seed`` is None."""
        if not self._auto_collation:
            return self._collate(self._read(index, seed))
        if self._get_all:
            if seed is not None:
                seed_all(seed_for(seed, next(iter(index), 0)))
            return self._collate(self._get_all(index))
        if seed is None:
            return self._collate([self._get(each) for each in index])
        return self._collate([self._read(each, seed) for each in index])

    def _read(self, index: Any, seed: int | None) -> Any:
        if seed is not None:
            seed_all(seed_for(seed, index))
        return self._get(index)


class IterableFetcher:
    """Batches of an iterable dataset.

    Args:
        source: Where they come from.
        collate: Makes the batch.
    """

    def __init__(self, source: BatchSource, collate: Callable[[Any], Any]) -> None:
        self._samples: Iterator[Any] = iter(source.dataset)
        self._collate, self._source = collate, source
        self._is_over = False

    def __call__(self, index: Sequence[Any] | Any) -> Any:
        """The next batch.

        Args:
            index: As many items as samples are wanted; with a single sample, anything.

        Raises:
            ExhaustedError: If there is none.
        """
        if self._is_over:
            raise ExhaustedError
        if not self._source.auto_collation:
            return self._collate(self._next())
        samples = []
        for _ in index:
            try:
                samples.append(self._next())
            except ExhaustedError:
                break
        if not samples or (self._source.drop_last and len(samples) < len(index)):
            raise ExhaustedError
        return self._collate(samples)

    def _next(self) -> Any:
        try:
            sample = next(self._samples)
        except StopIteration:
            self._is_over = True
            raise ExhaustedError from None
        return sample if self._source.transform is None else self._source.transform(sample)


def _get_transformed(get: Callable[[Any], Any], transform: Callable[[Any], Any], index: Any) -> Any:
    return transform(get(index))


def _get_all_transformed(get_all: Callable[[Any], Any], transform: Callable[[Any], Any], index: Any) -> list[Any]:
    return [transform(sample) for sample in get_all(index)]


def set_epoch(dataset: Any, epoch: int | None) -> None:
    """Tells a dataset its epoch, if it takes one."""
    if (
        epoch is not None
        and getattr(dataset, "epoch", None) != epoch
        and inspect.ismethod(getattr(dataset, "set_epoch", None))
    ):
        dataset.set_epoch(epoch)


def epoch_of(dataset: Any) -> int | None:
    """The epoch that a dataset was told last, if it takes and shows one."""
    epoch = getattr(dataset, "epoch", None)
    return epoch if isinstance(epoch, int) and hasattr(dataset, "set_epoch") else None
