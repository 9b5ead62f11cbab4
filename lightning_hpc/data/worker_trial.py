"""Reads batches of a loader to see how fast they are made, and leaves everything as it was."""

import contextlib
import copy
import itertools
import math
import multiprocessing
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_hpc.data.batch_stream import BatchStream
from lightning_hpc.data.fetching import BatchSource, epoch_of
from lightning_hpc.data.local_reader import EpochPlan
from lightning_hpc.data.mapping import SharedMapping
from lightning_hpc.data.position import generator_at, generator_state, sampler_of
from lightning_hpc.data.sampling import ElasticSampler, EvenBatchSampler
from lightning_hpc.data.seeding import KeptGenerators
from lightning_hpc.data.worker import WorkerSettings

_JOIN_S = 0.1  # nobody wants what a worker is still at


class WorkerTrial:
    """Batches like those of a loader, from workers whose number can be changed: a `Trial` for `sweep`.

    As a context, it gives generators that samplers draw from their states back, and ends the workers. The dataset is
    read in workers only, so that its own state stays; what it changes outside of its process (files, servers, shared
    memory) stays changed, and so does what a sampler of another class shares with a copy of itself.

    Args:
        loader: Whose batches they are.
        source: Where they come from.
    """

    def __init__(self, loader: DataLoader[Any], source: BatchSource) -> None:
        self._loader, self._source = loader, source
        self._restored = contextlib.ExitStack()

    def __enter__(self) -> "WorkerTrial":
        loader = self._loader
        self._restored.enter_context(KeptGenerators())
        for generator in _generators(loader):
            self._restored.enter_context(generator_at(generator, generator_state(generator)))
        settings = WorkerSettings(self._source, loader.worker_init_fn, 1, 0, SharedMapping())
        context = loader.multiprocessing_context or multiprocessing.get_context()
        self._stream = BatchStream(settings, context, prefetch_factor=1, timeout_s=None, in_order=False)
        try:
            self._next_batch = self._stream.begin(EpochPlan(endless_indices(loader), 0, epoch_of(loader.dataset)))
        except Exception:  # of a sampler that is not ready yet; whatever it is, it will come again in its place
            self._next_batch = self._stream.begin(EpochPlan(iter(()), 0, epoch_of(loader.dataset)))
        return self

    def __exit__(self, *_: Any) -> None:
        self._stream.close(_JOIN_S)
        self._restored.close()

    @property
    def is_ready(self) -> bool:
        """Whether all workers have started."""
        return self._stream.is_settled

    def resize(self, num_workers: int) -> None:
        """Changes the number of workers; an iterable dataset is read by one."""
        if not self._source.is_iterable:
            self._stream.resize(num_workers)

    def read(self, timeout_s: float) -> bool | None:
        """Reads a batch; returns whether there was one in time, and None if there are no more, or one has failed."""
        try:
            if not self._stream.wait(timeout_s):
                return False
            self._next_batch()
        except Exception:  # whatever it is, it will come again in its place
            return None
        return True


def endless_indices(loader: DataLoader[Any]) -> Iterator[Any]:
    """What a loader's sampler could give, again and again, without asking the sampler itself.

    Of the usual samplers, indices from all over the dataset, not its first ones alone: they would be in the file
    system's cache soon. They need no order of the whole dataset. Others are copied.
    """
    batch_sampler: Any = loader.batch_sampler
    size = loader.batch_size if batch_sampler is None else getattr(batch_sampler, "batch_size", None)
    if isinstance(loader.dataset, IterableDataset):
        return itertools.repeat(None if loader.batch_size is None else [None] * loader.batch_size)
    sampler: Any = sampler_of(loader)
    is_usual = type(sampler) in (SequentialSampler, RandomSampler, DistributedSampler, ElasticSampler)
    if not is_usual or type(batch_sampler) not in (BatchSampler, EvenBatchSampler, type(None)):
        return _again_and_again(loader)
    numel = len(vars(sampler)["dataset" if isinstance(sampler, DistributedSampler) else "data_source"])
    singles = _spread(numel, getattr(sampler, "shuffle", type(sampler) is RandomSampler))
    return singles if size is None else _batches(singles, min(size, numel))


def _spread(numel: int, is_shuffled: bool) -> Iterator[int]:
    step = max(round(0.618 * numel), 1) if is_shuffled else 1
    while math.gcd(step, numel) > 1:  # or it would leave some out
        step += 1
    return (position * step % numel for position in itertools.count()) if numel else iter(())


def _batches(singles: Iterator[int], size: int) -> Iterator[list[int]]:
    while batch := list(itertools.islice(singles, size)):
        yield batch


def _again_and_again(loader: DataLoader[Any]) -> Iterator[Any]:
    asked: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if any(isinstance(each, Iterator) for each in (asked, *getattr(asked, "__dict__", {}).values())):
        return  # it can be read once only, which is not for us
    try:
        copied = copy.copy(asked)
        if "sampler" in getattr(copied, "__dict__", ()):
            copied.sampler = copy.copy(copied.sampler)
    except TypeError:
        return
    is_empty = False
    while not is_empty:
        is_empty = True
        for index in copied:
            is_empty = False
            yield index


def _generators(loader: DataLoader[Any]) -> Iterable[torch.Generator]:
    holders = (loader, loader.sampler, loader.batch_sampler, sampler_of(loader))
    found = (getattr(holder, "generator", None) for holder in holders)
    return {id(each): each for each in found if isinstance(each, torch.Generator)}.values()
