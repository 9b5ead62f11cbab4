"""Guesses the next epoch before this one is over: its first batches are ready when it begins (Lightning#10389)."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_hpc.data.fetching import epoch_of
from lightning_hpc.data.position import generator_at, generator_state, sampler_of, skip
from lightning_hpc.data.sampling import ElasticSampler, EvenBatchSampler

_KNOWN_SAMPLERS = (SequentialSampler, RandomSampler, DistributedSampler, ElasticSampler)
_KNOWN_BATCH_SAMPLERS = (BatchSampler, EvenBatchSampler)


@dataclass(frozen=True)
class Guess:
    """An epoch that may come next.

    Attributes:
        indices: What the sampler gives in it.
        epoch: What the sampler has been told then; None if it takes no epoch.
        before: State of the generator that the order is drawn from, if it is; the guess is right only if it is the same
            when the epoch begins.
        after: Its state when the order was drawn.
    """

    indices: Iterator[Any]
    epoch: int | None
    before: Tensor | None
    after: Tensor

    def holds(self, loader: DataLoader[Any]) -> bool:
        """Whether the epoch that begins now is the one that was guessed."""
        if getattr(sampler_of(loader), "epoch", None) != self.epoch:
            return False
        return self.before is None or torch.equal(self.before, generator_state(loader.generator))


def guess_next_epoch(loader: DataLoader[Any]) -> Guess | None:
    """The epoch after the present one; None if the sampler or the dataset may do what nobody can know.

    The generator and the sampler are left as they are.
    """
    sampler = sampler_of(loader)
    is_known = type(sampler) in _KNOWN_SAMPLERS and type(loader.batch_sampler) in (*_KNOWN_BATCH_SAMPLERS, type(None))
    # From a generator of its own, a RandomSampler draws while it goes on, and once more at its end.
    has_generator = getattr(sampler, "generator", None) is not None
    if not is_known or has_generator or epoch_of(loader.dataset) is not None:
        return None
    sampler = copy.copy(sampler)
    epoch = sampler.epoch + 1 if isinstance(sampler, DistributedSampler) else None
    if epoch is not None:
        sampler.set_epoch(epoch)
    index_sampler: Any = sampler
    if loader.batch_sampler is not None:
        index_sampler = copy.copy(loader.batch_sampler)
        index_sampler.sampler = sampler
    is_drawn = type(sampler) is RandomSampler
    before = generator_state(loader.generator)
    with generator_at(loader.generator, before):
        if not loader.persistent_workers:  # then a new iterator draws a seed
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        indices = skip(iter(index_sampler), 0)
        after = generator_state(loader.generator)
    return Guess(indices, epoch, before if is_drawn else None, after)
