"""Streaming from tar shards: one order of all samples for any number of ranks and workers, read in long runs.

**Order.** `shard_order` shuffles blocks of consecutive samples, and the samples of as many blocks as fill the shuffle
buffer, a *window*, among each other. Any position of the order is found at once, without reading data.

**Ranks** take turns in that order: of R ranks, rank r takes the positions r, R + r, 2 R + r, and so on. What has been
consumed is thus a beginning of the one order, and a single number says where to go on, with any number of ranks.

**Workers** of a rank take its batches in turn, as `torch.utils.data.DataLoader` asks for them: the batches and their
order are the same for any number of workers.

**Reading.** While a worker hands out its part of a window, it reads its part of the next one in the order of the files,
one sample for each that leaves. So nothing waits until a shuffle buffer is full, and what is held does not grow.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info
from typing_extensions import override

from lightning_hpc.data.shard_index import Sample, ShardIndex
from lightning_hpc.data.shard_order import ShardOrder
from lightning_hpc.data.shard_paths import find_shards
from lightning_hpc.data.shard_reader import ShardReader


class TarShardDataset(IterableDataset[Any]):
    """Samples of tar shards in the WebDataset layout, in the same order for any number of ranks and workers.

    A sample is a dictionary: ``{"__key__": "train/0001", "jpg": b"…", "cls": b"7"}``; see `ShardIndex` for what forms
    one. Nothing in it is decoded or unpickled unless ``decode`` does so::

        dataset = TarShardDataset("train-{000..146}.tar", batch_size=64, shuffle=True, decode=to_image_and_label)
        loader = DataLoader(dataset, batch_size=64, num_workers=4)

    An epoch gives each sample once, and each rank the same number of samples, hence of batches. Where the ranks do not
    divide the samples, up to ``ranks - 1`` of them stay out: the last ones of the order, so with ``shuffle`` other ones
    each epoch.

    The loader must call `set_epoch` where a new epoch begins, and must have the same ``batch_size``: with another one,
    ``drop_last`` and the number of workers would decide which samples meet in a batch.

    Args:
        shards: Paths of uncompressed tar files; or one pattern with ``*``, ``?``, ``[…]`` (found files are sorted),
            ``{000..146}`` or ``{a,b}``.
        batch_size: Samples of a batch.
        decode: Turns a sample into what the dataset yields, in the worker. The default yields the dictionary.
        shuffle: Whether to shuffle. If not, samples come as they lie in the shards.
        buffer_size: Samples that are shuffled among each other, and that all workers of all ranks together hold in
            memory. They are read in runs of a 48th of it. If all samples fit, each order is as likely as any other.
        seed: The order of an epoch follows from this and the epoch.
        index_file: Where the index of the shards is kept for the next start. It is made if it does not exist or does
            not fit; on many ranks, make it before with ``ShardIndex.scan(paths).save(file)``. Without it all headers
            are read at each start, on each rank.
        num_replicas: Number of ranks. By default that of ``torch.distributed``, if initialised, else 1.
        rank: This rank. By default that of ``torch.distributed``, if initialised, else 0.

    Raises:
        FileNotFoundError: If a shard does not exist, or no file fits the pattern.
        ValueError: If an argument is out of range, a shard is listed twice, or a shard cannot be used; see
            `ShardIndex.scan`.
    """

    def __init__(
        self,
        shards: str | Path | Sequence[str | Path],
        *,
        batch_size: int,
        decode: Callable[[Sample], Any] | None = None,
        shuffle: bool = False,
        buffer_size: int = 2048,
        seed: int = 0,
        index_file: str | Path | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("buffer_size", buffer_size)):
            if not isinstance(value, int):
                raise TypeError(f"{name}={value!r} must be an integer")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value!r}")
        place = None if num_replicas is None or rank is None else (rank, num_replicas)
        if num_replicas != rank if place is None else not 0 <= place[0] < place[1]:
            raise ValueError(f"give both num_replicas and a rank below it, or none; got {num_replicas!r} and {rank!r}")
        self.batch_size = batch_size
        self.decode = decode
        self.shuffle = shuffle
        self.buffer_size = buffer_size
        self.seed = seed
        self.index = _load_index(find_shards(shards), index_file)
        self.epoch = 0
        self._position = 0  # how much of the epoch's order all ranks together have consumed
        self._place = place
        self._inherited_place: tuple[int, int] | None = None
        self._iterated: tuple[int, int] | None = None  # epoch and position, in a worker

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch. Its own epoch again changes nothing, so that one that was resumed goes on where it was.

        Raises:
            ValueError: If ``epoch`` is negative.
        """
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, got {epoch!r}")
        if epoch != self.epoch:
            self.epoch, self._position = epoch, 0

    def state_dict(self, consumed: int = 0) -> dict[str, int]:
        """What is needed to go on in this epoch, on any number of ranks: a few numbers.

        Args:
            consumed: Samples that each rank has consumed since the epoch began or a state was loaded. Only the loader
                knows: workers are ahead of it. A last, smaller batch may be counted as a whole one.

        Raises:
            ValueError: If ``consumed`` is negative, or goes beyond the last batch.
        """
        whole = math.ceil(len(self) / self.batch_size) * self.batch_size
        if not 0 <= consumed <= whole:
            raise ValueError(f"consumed={consumed!r} samples is not between 0 and {whole}, all batches of this rank")
        position = self._position + min(consumed, len(self)) * self._ranks()[1]
        return {"epoch": self.epoch, "position": position, **self._order_settings()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on from `state_dict`, with the next `iter`.

        Raises:
            ValueError: If the state is of other shards, or of another seed, ``shuffle`` or ``buffer_size``: the order
                would be another one, and samples would be lost or come twice.
        """
        missing = [name for name in ("epoch", "position", *self._order_settings()) if name not in state]
        if missing:
            raise ValueError(f"the state {state!r} is not one of TarShardDataset: it lacks {missing[0]!r}")
        for name, value in self._order_settings().items():
            if state[name] != value:
                raise ValueError(
                    f"the state was saved with {name}={state[name]!r}, but this dataset has {value!r}; make the dataset"
                    " as it was, with the same shards in the same order, or begin the epoch anew without the state"
                )
        if state["epoch"] < 0 or not 0 <= state["position"] <= len(self.index):
            raise ValueError(
                f"the state {state!r} has an epoch or a position that {len(self.index)} samples cannot have"
            )
        self.epoch, self._position = state["epoch"], state["position"]

    def __len__(self) -> int:
        """Samples that this rank has yet to get in this epoch, over all its workers; the same on each rank."""
        return (len(self.index) - self._position) // self._ranks()[1]

    @override
    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is not None:
            self._warn_of_repetition()
        return self._iterate(*((worker.id, worker.num_workers) if worker is not None else (0, 1)))

    def __getstate__(self) -> dict[str, Any]:
        # A worker that was not forked has no process group: it is told the rank of the process that starts it.
        return {**self.__dict__, "_inherited_place": _distributed_place() or self._inherited_place}

    def _ranks(self) -> tuple[int, int]:
        """This rank, and the number of ranks."""
        return self._place or _distributed_place() or self._inherited_place or (0, 1)

    def _order_settings(self) -> dict[str, int]:
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "buffer_size": self.buffer_size,
            "fingerprint": self.index.fingerprint,
        }

    def _warn_of_repetition(self) -> None:
        current = (self.epoch, self._position)
        if self.shuffle and self._iterated == current:
            warnings.warn(
                f"a persistent worker goes through epoch {self.epoch} again: set_epoch was not called, or did not reach"
                " it; use persistent_workers=False, or SharedMemoryLoader, which tells its workers",
                stacklevel=3,
            )
        self._iterated = current

    def _iterate(self, worker: int, workers: int) -> Iterator[Any]:
        parts = self._parts(worker, workers)
        with closing(ShardReader(self.index)) as reader:
            if not self.shuffle:
                for sample, content in chain.from_iterable(map(reader.read_each, parts)):
                    yield self._finish(sample, content)
                return
            coming: dict[int, bytes] = {}
            for part, following in pairwise(chain(parts, [np.empty(0, dtype=np.int64)])):
                held, coming = coming, {}
                ahead = reader.read_each(np.sort(following))
                for sample in part.tolist():
                    # Only the first part, and what a longer part has more than the one before, was not read ahead.
                    content = held.pop(sample) if sample in held else reader.read(sample)
                    coming.update(islice(ahead, 1))
                    yield self._finish(sample, content)

    def _parts(self, worker: int, workers: int) -> Iterator[NDArray[np.int64]]:
        """This worker's samples in each window, in the order in which they leave."""
        order = ShardOrder(len(self.index), self.buffer_size, self.shuffle, self.seed, self.epoch)
        rank, ranks = self._ranks()
        first, length = self._position + rank, len(self)
        for start, samples in order.windows(self._position):
            begin = max(math.ceil((start - first) / ranks), 0)
            end = min(math.ceil((start + len(samples) - first) / ranks), length)
            turns = np.arange(begin, end)
            mine = turns[turns // self.batch_size % workers == worker]
            if len(mine):
                yield samples[first + mine * ranks - start]

    def _finish(self, sample: int, content: bytes) -> Any:
        fields = self.index.unpack(sample, content)
        if self.decode is None:
            return fields
        try:
            return self.decode(fields)
        except Exception as error:
            shard = self.index.paths[self.index.spans(np.array([sample]))[0][0]]
            raise RuntimeError(f"decode failed for sample {fields['__key__']!r} of shard {shard}: {error!r}") from error


def _distributed_place() -> tuple[int, int] | None:
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(), dist.get_world_size()


def _load_index(paths: Sequence[str], file: str | Path | None) -> ShardIndex:
    if file is None:
        return ShardIndex.scan(paths)
    index = ShardIndex.load(file, paths)
    if index is None:
        index = ShardIndex.scan(paths)
        index.save(file)
    return index


def require_batch_size(dataset: object, batch_size: int | None) -> None:
    """Refuses a loader whose batches are others than those that a `TarShardDataset` counts.

    Raises:
        ValueError: If it has another batch size.
    """
    if isinstance(dataset, TarShardDataset) and batch_size is not None and dataset.batch_size != batch_size:
        raise ValueError(
            f"the loader has batch_size={batch_size}, and the TarShardDataset that it is to read has"
            f" {dataset.batch_size}; give both the same"
        )
