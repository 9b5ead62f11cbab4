"""Batches of sequences that fill a budget of tokens: close lengths together, equally many batches on every rank."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, distributed
from torch.utils.data import DistributedSampler, Sampler
from typing_extensions import Self, override

from lightning_hpc.data.token_plan import Ints, TokenPlan, cut_last_steps, fill_last_step


class TokenBudgetBatchSampler(Sampler[list[int]]):
    """Batches of samples of close lengths, each within a budget of tokens, the same number of them on every rank.

    Every sample is in exactly one batch of an epoch. A batch of n samples, the longest of L tokens, satisfies
    ``n * L <= max_tokens``. Use it as ``DataLoader(dataset, batch_sampler=TokenBudgetBatchSampler(lengths, 8192))``.

    All ranks plan the same batches, in the same order, from ``lengths``, ``seed`` and epoch, without communication;
    rank r of R takes every R-th. In an epoch's last step, where fewer batches than ranks are left, the largest are
    split. Only where that is impossible, with hardly more samples than batches, up to R - 1 samples are repeated in the
    last step, and rank 0 warns.

    Composition and order change with each epoch that `set_epoch` announces. The number of batches does not (Lightning
    asks for it once), and is within a few per cent of the least possible. Padding is below 3 % of a batch on the usual
    long-tailed lengths; with less than some hundred batches an epoch, each spans more lengths and pads more. There, and
    among samples of exceptional length, the same samples meet more often. A step's loss weighs each batch alike,
    although they hold different numbers of samples: weigh metrics by samples where that matters.

    Lightning: works with ``use_distributed_sampler`` True and False, and with Fabric. With True, Lightning builds a
    copy of the sampler that knows the strategy's ranks; the copy and the original share epoch and position.
    ``Trainer(overfit_batches=...)`` cannot turn the shuffling off: pass ``shuffle=False``. When Lightning resumes, it
    starts a `DataLoader` with workers before it announces the epoch, so that one has the order of epoch 0 again, unless
    `set_epoch` was called before ``fit``.

    Resuming within an epoch: a loader knows how many batches were consumed, and passes that to `state_dict`. After
    `load_state_dict`, also with another number of ranks, the samples that nobody consumed follow, in the same order.
    ``len()`` counts the batches before the interruption too.

    Args:
        lengths: Tokens of each sample, ``[num_samples]``, whole numbers: a sequence, an array or a tensor.
        max_tokens: Tokens of a batch at most, padding counted.
        max_samples: Samples of a batch at most.
        shuffle: Whether composition and order change with seed and epoch. If not, the longest samples come first, so
            that a batch that does not fit into memory shows at once, and only equal lengths share the padding.
        seed: Base of the shuffling, at least 0, the same on all ranks.
        num_replicas: Number of ranks that share the data. By default that of `torch.distributed` when the sampler is
            used, so it may be built before the process group; 1 without one.
        rank: The rank among these; give both or none.
        batch_size: For Lightning only, which rebuilds batch samplers by ``cls(sampler, batch_size=..., drop_last=...)``
            from the attributes of those names.
        drop_last: As ``batch_size``.

    Raises:
        TypeError: If a size, the seed or an epoch is no whole number.
        ValueError: If a sample has more than ``max_tokens`` (the message has its index and length) or less than zero
            tokens, or an argument is out of range.
    """

    drop_last = False

    def __init__(
        self,
        lengths: Sequence[int] | npt.NDArray[np.integer[Any]] | Tensor,
        max_tokens: int = 0,
        *,
        max_samples: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        batch_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        self._injected: tuple[int, int] | None = None
        if isinstance(batch_size, _BatchSize):
            self.__dict__.update(batch_size.sampler.__dict__)
            if isinstance(lengths, DistributedSampler):
                self._injected = (lengths.num_replicas, lengths.rank)
            return
        if batch_size is not None or drop_last:
            raise ValueError(
                f"batches are as large as max_tokens and max_samples admit, and no sample is left over, "
                f"got batch_size={batch_size!r}, drop_last={drop_last!r}; leave them out."
            )
        _require_at_least(1, max_tokens=max_tokens, max_samples=max_samples)
        _require_at_least(0, seed=seed)
        self._plan = TokenPlan(_checked_lengths(lengths, max_tokens), max_tokens, max_samples or max_tokens, shuffle)
        self._progress = _Progress(seed)
        self._given = _checked_ranks(num_replicas, rank)

    @property
    def sampler(self) -> Self:
        """Itself: Lightning announces epochs to ``dataloader.batch_sampler.sampler``."""
        return self

    @property
    def batch_size(self) -> int:
        """Mean number of samples of a batch, rounded, at least 1."""
        size = _BatchSize(max(1, round(self._plan.num_samples / max(1, self._plan.num_batches))))
        size.sampler = self
        return size

    def set_epoch(self, epoch: int) -> None:
        """Begins another epoch; the position in the current one stays if it is announced again.

        Raises:
            ValueError: If ``epoch`` is negative.
        """
        _require_at_least(0, epoch=epoch)
        if epoch != self._progress.epoch:
            self._progress.epoch, self._progress.position = epoch, _Position()

    @override
    def __iter__(self) -> Iterator[list[int]]:
        progress = self._progress
        begun = progress.begin()
        num_replicas, rank = self._ranks()
        position = self._position(num_replicas)
        order, _ = self._epoch_batches()
        edges = cut_last_steps(self._edges_from(position.start_sample), num_replicas)
        pieces = fill_last_step(len(edges) - 1, num_replicas)
        if rank == 0 and len(pieces) >= len(edges):
            _warn_of_repetition(len(pieces) - len(edges) + 1, num_replicas)
        mine = pieces[position.batches * num_replicas + rank :: num_replicas]
        for begin, end in zip(edges[mine].tolist(), edges[mine + 1].tolist(), strict=True):
            yield order[begin:end].tolist()
        progress.finished = begun

    def __len__(self) -> int:
        num_replicas, _ = self._ranks()
        position = self._position(num_replicas)
        left = len(self._edges_from(position.start_sample)) - 1
        return position.earlier_batches + math.ceil(left / num_replicas)

    def state_dict(self, consumed_batches: int = 0) -> dict[str, Any]:
        """The position in the epoch: a few numbers, whatever the number of samples.

        Args:
            consumed_batches: Batches that each rank consumed since the present iteration began. They add to
                ``"batches"`` of the state. A loader that may still iterate when the next epoch is announced takes the
                state when it begins to iterate, and adds them itself.

        Raises:
            ValueError: If ``consumed_batches`` is negative.
        """
        _require_at_least(0, consumed_batches=consumed_batches)
        position = self._position(self._ranks()[0])
        return {
            "fingerprint": self._plan.fingerprint,
            "seed": self._progress.seed,
            "epoch": self._progress.epoch,
            **asdict(replace(position, batches=position.batches + consumed_batches)),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues where a state was taken, for any number of ranks, with the seed of that run.

        Raises:
            ValueError: If the state belongs to other samples or another budget.
        """
        if state_dict.get("fingerprint") != self._plan.fingerprint:
            raise ValueError(
                "the state was taken with other lengths, max_tokens, max_samples or shuffle, so its position means "
                "other samples here. Pass what that run passed, or do not load the state, to begin the epoch anew."
            )
        self._progress.seed = state_dict["seed"]
        self._progress.epoch = state_dict["epoch"]
        self._progress.position = _Position(**{field.name: state_dict[field.name] for field in fields(_Position)})

    def _ranks(self) -> tuple[int, int]:
        """Number of ranks, and this one's."""
        known = self._given or self._injected
        if known is not None:
            return known
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_world_size(), distributed.get_rank()
        return 1, 0

    def _position(self, num_replicas: int) -> "_Position":
        """The position for this number of ranks: batches that another number of them consumed become samples."""
        position = self._progress.position
        if position.num_replicas == num_replicas:
            return position
        if position.batches == 0:
            return replace(position, num_replicas=num_replicas)
        edges = cut_last_steps(self._edges_from(position.start_sample), position.num_replicas)
        start_sample = int(edges[min(position.batches * position.num_replicas, len(edges) - 1)])
        return _Position(start_sample, position.earlier_batches + position.batches, num_replicas)

    def _epoch_batches(self) -> tuple[Ints, Ints]:
        return self._plan.batches(self._progress.seed, self._progress.epoch)

    def _edges_from(self, start_sample: int) -> Ints:
        """Edges of the batches that are left; the first may be the rest of one."""
        _, edges = self._epoch_batches()
        return np.concatenate(([start_sample], edges[edges > start_sample]))


class _BatchSize(int):
    """A number that knows whose it is, so that a rebuilt sampler can take everything over."""

    sampler: TokenBudgetBatchSampler


@dataclass(frozen=True)
class _Position:
    """Which samples of an epoch have been consumed.

    Attributes:
        start_sample: Samples, in the epoch's order, that earlier numbers of ranks consumed.
        earlier_batches: Batches of a rank which that took.
        num_replicas: The number of ranks since then.
        batches: Batches that each of them consumed since then.
    """

    start_sample: int = 0
    earlier_batches: int = 0
    num_replicas: int = 1
    batches: int = 0


@dataclass
class _Progress:
    """What changes in the life of a sampler, shared with the copies that Lightning makes."""

    seed: int
    epoch: int = 0
    position: _Position = _Position()
    finished: _Position | None = None
    """The position that an iteration began at and went on from to the end."""

    def begin(self) -> _Position:
        # A resumed epoch that came to its end is followed by a whole one, even if nobody announces epochs. Not before:
        # workers exhaust the sampler while the loader still needs the position.
        if self.finished is self.position:
            self.position = _Position()
        return self.position


def _warn_of_repetition(repeated: int, num_replicas: int) -> None:
    warnings.warn(
        f"{repeated} samples are repeated at the end of the epoch, so that {num_replicas} ranks get equally many "
        "batches: there are too few samples, or batches of a single one. A larger max_tokens or fewer ranks avoid it.",
        stacklevel=3,
    )


def _checked_lengths(lengths: Any, max_tokens: int) -> Ints:
    array = np.asarray(lengths.cpu() if isinstance(lengths, Tensor) else lengths)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        what = repr(lengths) if array.ndim == 0 else f"an array of {array.dtype} and shape {list(array.shape)}"
        raise ValueError(f"lengths must be whole numbers, one a sample, got {what}; round fractions up.")
    array = array.astype(np.int64)
    unfit = np.flatnonzero((array < 0) | (array > max_tokens))
    if unfit.size:
        raise ValueError(
            f"sample {unfit[0]} has {array[unfit[0]]} tokens, not within 0 and max_tokens={max_tokens} "
            f"({unfit.size} such samples in all); truncate or leave out what is longer, or raise max_tokens."
        )
    return array


def _checked_ranks(num_replicas: int | None, rank: int | None) -> tuple[int, int] | None:
    if num_replicas is None and rank is None:
        return None
    if num_replicas is None or rank is None or not 0 <= rank < num_replicas:
        raise ValueError(
            f"rank must be within 0 and num_replicas - 1, got rank={rank!r}, num_replicas={num_replicas!r}."
        )
    return num_replicas, rank


def _require_at_least(least: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name}={value!r} must be a whole number.")
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value!r}.")
