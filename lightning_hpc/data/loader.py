"""`SharedMemoryLoader`: a `DataLoader` whose workers put batches into memory that is used again and again."""

import multiprocessing
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe, MapDataPipe, Sampler
from typing_extensions import override

from lightning_hpc.data.automatic_workers import AutomaticWorkers, require_workers
from lightning_hpc.data.batch_stream import BatchStream
from lightning_hpc.data.device_prefetch import prefetcher_for
from lightning_hpc.data.epoch_iterator import EpochIterator, Progress
from lightning_hpc.data.fetching import BatchSource, epoch_of
from lightning_hpc.data.local_reader import EpochPlan, LocalReader
from lightning_hpc.data.locality import cpus_near
from lightning_hpc.data.lookahead import Guess, guess_next_epoch
from lightning_hpc.data.mapping import SharedMapping
from lightning_hpc.data.operator_graph import OperatorGraph
from lightning_hpc.data.page_lock import PageLock
from lightning_hpc.data.placed_operators import PlacedOperators, require_transforms
from lightning_hpc.data.position import (
    Position,
    advanced,
    batches_left,
    generator_at,
    generator_state,
    go_behind,
    go_to,
    length_of,
    order_generator,
    order_state,
    require_same_shares,
    set_generator_state,
    shares_of,
    skip,
    told_epoch,
)
from lightning_hpc.data.seeding import mix
from lightning_hpc.data.shards import require_batch_size
from lightning_hpc.data.worker import WorkerSettings

T = TypeVar("T", covariant=True)


class SharedMemoryLoader(DataLoader[T]):
    """Takes the place of `torch.utils.data.DataLoader`: same arguments, batches, order and errors.

    Workers collate samples straight into slots of one shared mapping, which are used again as soon as nobody holds the
    batch any more, or any tensor, view or array made from it.

    Differences: workers are kept from epoch to epoch unless ``persistent_workers=False``; a worker that dies is
    replaced, and its batch made again; what is random in a sample depends on the epoch and the sample's index, not on
    the number of workers; with workers, a new iterator ends the one before, unless ``persistent_workers=False``.

    Args:
        dataset: Map-style or iterable.
        batch_size: As all further ones: see `DataLoader`.
        shuffle: See there.
        sampler: See there.
        batch_sampler: See there.
        num_workers: See there. ``"auto"`` reads for about two seconds to choose, none where they would only cost, and
            changes the number while the loader is used; a number that is set stays.
        collate_fn: See there. A function of your own costs one copy of the batch more.
        pin_memory: See there.
        drop_last: See there.
        timeout: See there.
        worker_init_fn: See there.
        multiprocessing_context: See there.
        generator: See there.
        prefetch_factor: See there.
        persistent_workers: Whether workers, with their copy of the dataset, are kept. None keeps them, and draws seeds
            as `DataLoader` does without.
        pin_memory_device: See there.
        in_order: See there.
        operators: What is made of each sample, a mapping then, before it is collated; steps that run on the device take
            the batch there. Between epochs, steps that may run on either side move where they cost less.
        device: Where batches are handed out, if not in host memory: a CUDA device, ``"cuda"`` for the current one.
        device_transform: Called with each batch on the device, on the stream of the copies (a Module is moved there),
            or in `next` where batches stay in host memory.
        device_prefetch: Batches on their way to the device, at least 1.

    Attributes:
        count_waiting: Says how often a batch was asked for that nobody has consumed yet, and whether the epoch is over,
            if somebody knows.
    """

    def __init__(
        self,
        dataset: Dataset[T],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool | None = None,
        pin_memory_device: str = "",
        in_order: bool = True,
        operators: OperatorGraph | None = None,
        device: str | torch.device | None = None,
        device_transform: Callable[[Any], Any] | None = None,
        device_prefetch: int = 2,
    ) -> None:
        self._stream: BatchStream | None = None
        self._automatic: AutomaticWorkers | None = None
        require_workers(num_workers, prefetch_factor)
        require_transforms(operators, device_transform)
        require_batch_size(dataset, batch_size)
        has_device = torch.device(device or "cpu").type == "cuda"
        self._placed: PlacedOperators | None = None
        if operators is not None:
            self._placed = PlacedOperators(operators, device_transform, has_device=has_device)
        self._prefetcher = prefetcher_for(device, self._placed or device_transform, device_prefetch)
        self.device, self.device_transform, self.device_prefetch = device, device_transform, device_prefetch
        self.operators = operators
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            1 if num_workers == "auto" else num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,  # type: ignore[arg-type]
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self._base_seed: int | None = None
        self._seed: int | None = None
        self._to_load: Position | None = None
        self._guess: tuple[Guess, EpochPlan] | None = None
        self._progress: Progress | None = None
        self._length: int | None = None
        self.count_waiting: Callable[[], tuple[int, bool]] | None = None
        if isinstance(dataset, IterableDataset) and hasattr(dataset, "set_epoch"):
            # Lightning tells epochs to samplers only.
            cast(Any, self.sampler).set_epoch = dataset.set_epoch
        if num_workers == "auto":
            # Where Lightning looks for the arguments of a loader that it makes from this one.
            self._keep(_automatic=AutomaticWorkers(self, self._source()), num_workers="auto")

    @property
    def num_workers(self) -> int:
        """How many there are now. One that is set stays."""
        return int(vars(self)["num_workers"]) if self._automatic is None else self._automatic.num_workers

    @num_workers.setter
    def num_workers(self, num_workers: int) -> None:
        if not isinstance(num_workers, int) or num_workers < 0:
            raise ValueError(f"num_workers={num_workers!r} must be an integer of at least 0; make a loader for 'auto'")
        if self._automatic is None and num_workers != vars(self).get("num_workers", num_workers):
            self.close()  # the next iteration starts so many
        self._keep(num_workers=num_workers, _automatic=None)

    def share_processors(self, ranks: int) -> None:
        """Leaves their part of this machine's processors to its other ranks, with ``num_workers="auto"``."""
        if self._automatic is not None:
            self._automatic.share(ranks)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stream": None, "_progress": None, "_guess": None}

    def _keep(self, **state: Any) -> None:
        """Sets what changes while the loader is used.

        Lightning records attributes that are set, to set them on loaders that it makes from this one; it would keep
        workers alive by that, and share them.
        """
        self.__dict__.update(state)

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if isinstance(self.dataset, (IterDataPipe, MapDataPipe)):
            return super().__iter__()  # torch has deprecated them, and shuffles and shards them in its own iterators
        return EpochIterator(self, self._begin, self._prefetcher, self._placed or self.device_transform)

    @override
    def __len__(self) -> int:
        return super().__len__() if self._length is None else self._length

    def close(self) -> None:
        """Ends the workers. The next iteration starts new ones; one that is under way cannot go on."""
        self._keep(_guess=None)
        if self._prefetcher is not None:
            self._prefetcher.close()
        if self._stream is not None:
            self._stream.close()
            self._keep(_stream=None)

    def state_dict(self) -> dict[str, Any]:
        """The place in the epoch, of a size that does not depend on it.

        It counts the batches that were handed out; under `SharedMemoryDataModule` those that were trained on, which are
        fewer where Lightning looks ahead (with datasets without a length) or a step is under way.
        """
        if self._to_load is not None:
            return self._to_load.to_dict()
        progress = self._progress
        if progress is None:
            return Position(generator_state(order_generator(self)), is_over=True).to_dict()
        consumed, is_over = progress.handed_out, progress.is_over
        if self.count_waiting is not None:
            waiting, is_over = self.count_waiting()
            consumed = min(max(progress.asked - waiting, 0), consumed)
        elif not self._source().is_iterable:
            is_over = is_over or progress.total >= len(self)
        position, own = replace(advanced(self, progress.start, consumed), is_over=is_over), order_generator(self)
        if own is not None:
            position.generator_now = generator_state(own)
        return position.to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a place that `state_dict` has saved; the next iteration begins there.

        With a sampler or dataset that has ``state_dict(consumed)`` itself, as `ElasticSampler`,
        `TokenBudgetBatchSampler` and `TarShardDataset`, also for another number of ranks. Otherwise the sampler's order
        is drawn again and passed by, and what an iterable dataset has given is read again.

        Raises:
            ValueError: If it was saved by something else, or with another kind of sampler.
        """
        position = Position.from_dict(state)
        require_same_shares(self, position)
        self.close()  # the workers' copies of the dataset are at another place
        self._keep(_seed=position.seed, _progress=None)
        if position.is_over:
            self._keep(_to_load=None)
            if position.order is not None:
                go_behind(self, position.order)
            if position.generator_now is not None:
                set_generator_state(order_generator(self), position.generator_now)
        else:
            self._keep(_to_load=position if position.order is None else self._go_to(position, position.order))

    def _go_to(self, position: Position, order: dict[str, Any]) -> Position:
        """Goes to a place that may be of another number of ranks, which counts the batches before it otherwise."""
        total = length_of(self)
        go_to(self, order)
        if total is None:
            return position
        self._keep(_length=total)
        left = batches_left(self, position.earlier)
        return replace(position, order=order_state(self), earlier=total - left)

    def _begin(self, seed: int | None = None) -> tuple[Progress, Callable[[], Any]]:
        """Begins an epoch, or what is left of it.

        Args:
            seed: For what is random in samples; None makes it from that of the last epoch, or draws it.
        """
        is_resumed = self._to_load is not None
        position, plan = self._begin_epoch(seed)
        progress = Progress(position, is_resumed, told_epoch(self))
        self._keep(_progress=progress)
        next_batch = self._reader(plan)
        if position.order is None and self._source().is_iterable:
            for _ in range(position.batches):
                next_batch()
        return progress, next_batch

    def _begin_epoch(self, seed: int | None) -> tuple[Position, EpochPlan]:
        position = self._to_load
        self._keep(_to_load=None)
        if position is None:
            if self._placed is not None and self._placed.review(self):
                self.close()  # the workers have the former steps
            self._keep(_length=None)
            position = Position(generator_state(order_generator(self)), seed, order_state(self), shares=shares_of(self))
            guess = self._guess
            self._keep(_guess=None)
            if guess is not None and guess[0].holds(self):
                if guess[0].before is None:
                    self._draw_indices()
                else:
                    set_generator_state(self.generator, guess[0].after)
                position.seed = guess[1].seed
                self._keep(_seed=position.seed)
                return position, guess[1]
            indices = self._draw_indices()
            if position.order is not None:
                # A sampler whose resumed epoch is over begins a whole one when it is asked for the first index.
                indices = skip(indices, 0)
                position.order = order_state(self)
        else:
            own = order_generator(self)
            with generator_at(own, position.generator, is_restored=own is None):
                indices = self._draw_indices()
                if not self._source().is_iterable:
                    indices = skip(indices, 0 if position.order is not None else position.batches)
        if position.seed is None:
            # Not drawn for each epoch, so that a resumed run has the same ones.
            assert self._base_seed is not None
            position.seed = self._base_seed if self._seed is None else mix(self._seed)
        self._keep(_seed=position.seed)
        return position, self._plan(indices, position.seed)

    def _plan(self, indices: Iterator[Any], seed: int) -> EpochPlan:
        guess = weakref.WeakMethod(self._guess_next)  # the plan is kept in the stream, which is ours
        return EpochPlan(indices, seed, epoch_of(self.dataset), lambda: (found := guess()) and found())

    def _guess_next(self) -> EpochPlan | None:
        guess = None if self.persistent_workers is False else guess_next_epoch(self)
        if guess is None:
            return None
        assert self._seed is not None
        plan = self._plan(guess.indices, mix(self._seed))
        self._keep(_guess=(guess, plan))
        return plan

    def _draw_indices(self) -> Iterator[Any]:
        """Draws from the generator what `DataLoader` draws, in its order."""
        if self._base_seed is not None and self.persistent_workers and self.num_workers:
            return iter(self._index_sampler)
        indices = iter(self._index_sampler)
        self._keep(_base_seed=int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item()))
        # With workers, a new iterator of `DataLoader` asks twice.
        return iter(self._index_sampler) if self.num_workers else indices

    def _reader(self, plan: EpochPlan) -> Callable[[], Any]:
        """What gives the next batch."""
        if not self.num_workers:
            return LocalReader(self._source(), plan).next
        stream = self._stream or self._start_stream(plan.seed)
        if self.persistent_workers is not False:
            self._keep(_stream=stream)
        next_batch = stream.begin(plan)
        return next_batch if self._automatic is None else self._automatic.reader(stream, next_batch)

    def _source(self) -> BatchSource:
        transform = None if self._placed is None else self._placed.placement.worker
        return BatchSource(self.dataset, self.collate_fn, self._auto_collation, self.drop_last, transform)

    def _start_stream(self, seed: int) -> BatchStream:
        most = self.num_workers if self._automatic is None else self._automatic.most
        mapping = SharedMapping(cpus_near(self.device, most))
        settings = WorkerSettings(self._source(), self.worker_init_fn, self.num_workers, seed, mapping)
        assert self.prefetch_factor is not None
        return BatchStream(
            settings,
            self.multiprocessing_context or multiprocessing.get_context(),
            prefetch_factor=self.prefetch_factor,
            timeout_s=self.timeout or None,
            in_order=self.in_order,
            page_lock=None if self._prefetcher is None else PageLock(mapping, self._prefetcher.device),
        )
