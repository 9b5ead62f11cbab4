"""What Lightning's fit loop does not know of the place of its training loaders; all private names for that are here."""

from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.loops.loop import _Loop
from typing_extensions import override

from lightning_hpc.data.loader import SharedMemoryLoader
from lightning_hpc.data.position import length_of


class Resumption(pl.Callback):
    """Lets training loaders go on where a checkpoint was saved, also where Lightning 2.6 leaves that out.

    It gives loaders their states only if they are made within an epoch: not between two, and not where a scheduler has
    asked for `Trainer.estimated_stepping_batches`, as they are made before the checkpoint is read then. With
    ``max_steps`` it counts epochs wrongly. On another number of ranks it counts other batches than the loader.
    """

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loop: Any = trainer.fit_loop
        if not loop.is_resuming:
            return
        loaders = _loaders(trainer)
        stateful = [loader for loader in loaders if hasattr(loader, "load_state_dict")]
        states, loop._combined_loader_states_to_load = loop._combined_loader_states_to_load, []
        is_between = _settle_epochs(loop)
        if is_between and not states:
            states = [loader.state_dict() for loader in stateful]
        if states and len(states) == len(stateful):
            for loader, state in zip(stateful, states, strict=True):
                if isinstance(loader, SharedMemoryLoader):
                    loader.load_state_dict({**state, "is_over": True} if is_between else state)
                elif not is_between:
                    loader.load_state_dict(state)
            iter(loop._data_fetcher)
        if len(loaders) == 1 and isinstance(loaders[0], SharedMemoryLoader):
            _count_as(loaders[0], loop.epoch_loop.batch_progress)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A checkpoint may be saved later, when Lightning has thrown away what it had looked ahead at.
        waiting: Any = _count_waiting(trainer)
        for loader in _loaders(trainer):
            if isinstance(loader, SharedMemoryLoader) and loader.count_waiting is not None:
                loader.count_waiting = partial(tuple, waiting)


def watch(loader: SharedMemoryLoader[Any], trainer: pl.Trainer) -> None:
    """Lets a training loader know which of its batches a Trainer has not trained on yet."""
    loader.count_waiting = partial(_count_waiting, trainer)


def _loaders(trainer: Any) -> list[Any]:
    loaders: list[Any] = trainer.fit_loop._combined_loader.flattened
    return loaders


def _count_waiting(trainer: Any) -> tuple[int, bool]:
    """How often Lightning has asked for what it has not trained on, and whether it will begin a new epoch."""
    fetcher, batches = trainer.fit_loop._data_fetcher, trainer.fit_loop.epoch_loop.batch_progress
    counted = batches.current
    looked_ahead = len(getattr(fetcher, "batches", ()))
    # `fetched` is that of the whole epoch, but only once the epoch has begun.
    waiting = max(counted.ready + looked_ahead, fetcher.fetched) - counted.processed
    was_asked_in_vain = fetcher.length is None and fetcher.done
    # Once the last batch is completed, Lightning goes on at the end of the epoch.
    is_over = batches.is_last_batch and counted.ready == counted.processed > counted.completed
    return waiting + was_asked_in_vain, is_over


def _settle_epochs(loop: Any) -> bool:
    """Whether the fit loop goes on between two epochs; lets it know what else it would go through again, or leave out.

    It has counted an epoch that ``max_steps`` has stopped as a whole one, and if it stops by steps, it takes a place
    between two epochs as one within the first or second.
    """
    epochs, batches = loop.epoch_progress, loop.epoch_loop.batch_progress
    is_counted = epochs.current.ready == epochs.current.processed
    is_settled = is_counted and 0 < batches.current.processed == batches.current.completed
    if is_settled and not batches.is_last_batch:
        cast(Any, _Loop.restarting).fset(loop, True)  # which it denies where the new run has no max_steps
    if loop.restarting and is_settled:
        if batches.is_last_batch:
            if epochs.current.completed < epochs.current.processed:
                epochs.increment_completed()
            loop.reset_restart_stage()
            cast(Any, _Loop.restarting).fset(loop, False)  # the fit loop's own setter would look at max_steps
        else:
            for counts in (epochs.total, epochs.current):
                counts.processed -= 1
                counts.completed = counts.processed
            loop.update_restart_stage()
    return not loop.restarting


def _count_as(loader: SharedMemoryLoader[Any], batches: Any) -> None:
    """Lets Lightning count the batches before a loader's place as the loader does."""
    place, length, counted = loader.state_dict(), length_of(loader), batches.current
    total = place["earlier"] + place["batches"]
    if batches.is_last_batch and counted.processed > counted.completed:  # a new epoch begins
        total, batches.is_last_batch = length or 0, length is not None
    elif place["order"] is None:
        return
    difference = total - counted.processed
    for name in ("ready", "started", "processed", "completed"):
        setattr(counted, name, getattr(counted, name) + difference)
