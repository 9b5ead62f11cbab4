"""Samplers of several ranks that can stop anywhere and go on with any number of ranks."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sized
from typing import Literal

import torch
from torch.utils.data import DistributedSampler, Sampler
from typing_extensions import override


class ElasticSampler(DistributedSampler[int]):
    """The order of `DistributedSampler`, which can be left and taken up again, also by another number of ranks.

    The order of an epoch's samples depends on seed and epoch alone; the ranks take turns in it. So all that were read
    after some batches are the first ones of that order, and a number is enough to go on with the others.

    Args:
        dataset: What is to be sampled.
        num_replicas: Number of ranks.
        rank: Which of them this is.
        shuffle: Whether the order is random, another one in each epoch.
        seed: Of the order; the same on all ranks.
        drop_last: Whether what does not divide by the number of ranks is left out.
        repeats: Whether otherwise some samples are read twice, so that all ranks get as many. If not, some ranks get
            one less.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int,
        rank: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        repeats: bool = True,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        self._numel = len(dataset)
        self._repeats = repeats
        self._resumed_epoch = -1
        self._is_exhausted = False
        self._begin_whole()

    @override
    def set_epoch(self, epoch: int) -> None:
        if epoch != self._resumed_epoch:
            self._begin_whole()
        super().set_epoch(epoch)

    @override
    def __iter__(self) -> Iterator[int]:
        # A resumed epoch that came to its end is followed by a whole one, even if nobody announces epochs. Not before:
        # workers exhaust the sampler while the place is still asked for.
        if self._is_exhausted:
            self._begin_whole()
        yield from self._left()
        self._is_exhausted = True

    def _begin_whole(self) -> None:
        self._start = 0  # samples that all ranks together have read before a resumption
        self._is_exhausted = False

    def _left(self) -> list[int]:
        order = self._order()
        left = order[self._start :]
        share = self._share(len(left))
        if self._repeats and not self.drop_last and order:
            missing = share * self.num_replicas - len(left)
            left = left + (order * math.ceil(missing / len(order)))[:missing]
        if self.drop_last:
            left = left[: share * self.num_replicas]
        return left[self.rank :: self.num_replicas]

    @override
    def __len__(self) -> int:
        """Samples that this rank has yet to get in this epoch; all of its epoch, if it was not resumed."""
        left = self._numel - self._start
        if self._repeats or self.drop_last:
            return self._share(left)
        return max(0, math.ceil((left - self.rank) / self.num_replicas))

    def state_dict(self, consumed: int = 0) -> dict[str, int]:
        """What is needed to go on in this epoch.

        Args:
            consumed: Samples that each rank has read since the epoch began or a state was loaded.
        """
        start = min(self._start + consumed * self.num_replicas, self._numel)
        return {"epoch": self.epoch, "start": start, "seed": self.seed, "samples": self._numel}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on from `state_dict` with the next `iter`, in the same epoch.

        Raises:
            ValueError: If the state belongs to another number of samples.
        """
        if state["samples"] != self._numel:
            raise ValueError(
                f"the state is that of {state['samples']} samples, but there are {self._numel}; use the same dataset,"
                " or begin the epoch anew without the state"
            )
        self.seed, self.epoch = state["seed"], state["epoch"]
        self._start, self._is_exhausted = state["start"], False
        self._resumed_epoch = self.epoch

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self._numel))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(self._numel, generator=generator).tolist()
        return order

    def _share(self, numel: int) -> int:
        return numel // self.num_replicas if self.drop_last else math.ceil(numel / self.num_replicas)


class EvenBatchSampler(Sampler[list[int]]):
    """Batches for evaluation: every sample once, and the same number of batches on all ranks.

    Where the samples do not divide by the number of ranks, some have one less. They give as many batches as the others
    all the same, by making the last ones smaller, so that a collective in each step does not hang, and no sample is
    counted twice to that end (Lightning#5060). Only where that is impossible, with fewer samples than ranks or with a
    last step of single samples, the ranks that have too few read one again, and rank 0 warns.

    Args:
        sampler: The samples of this rank, made with ``repeats=False``.
        batch_size: Samples in a batch.
        drop_last: For Lightning only, which rebuilds batch samplers with this argument for ``predict``.
    """

    def __init__(self, sampler: ElasticSampler, batch_size: int, drop_last: Literal[False] = False) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last
        repeated = len(self) * sampler.num_replicas - sampler._numel
        if repeated > 0 and sampler.rank == 0:
            warnings.warn(
                f"{repeated} of {sampler._numel} samples count twice, as {sampler.num_replicas} ranks evaluate"
                f" {len(self)} batches of at least one sample each",
                stacklevel=2,
            )

    @override
    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        if len(indices) < len(self):  # by one
            indices.append(self.sampler.rank % self.sampler._numel)
        begin = 0
        for left in range(len(self), 0, -1):
            end = min(begin + self.batch_size, len(indices) - (left - 1))
            yield indices[begin:end]
            begin = end

    def __len__(self) -> int:
        most = math.ceil(self.sampler._numel / self.sampler.num_replicas)
        return math.ceil(most / self.batch_size)
