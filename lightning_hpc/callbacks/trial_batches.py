"""Batches of the training loader, read apart from the fit. Lightning's private names for that are here."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.data_connector import _process_dataloader, _request_dataloader
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader

from lightning_hpc.data.loader import SharedMemoryLoader
from lightning_hpc.data.seeding import GeneratorStates


def are_loaders_given(trainer: pl.Trainer) -> bool:
    """Whether the fit was given loaders, which nobody can make anew, rather than a module that makes them."""
    return not trainer.fit_loop._data_source.is_module()


@contextmanager
def trial_batches(trainer: pl.Trainer, count: int) -> Iterator[tuple[list[Any], set[int | None]]]:
    """The first batches of new training loaders, as the fit would make them.

    Random numbers are put back, those of the loaders' own generators too; what a dataset remembers of being read is
    not.

    Args:
        trainer: In a fit.
        count: How many batches; there may be fewer.

    Yields:
        The batches, on the host, and the batch sizes that the loaders say they have; None among them for one that does
        not know.
    """
    states = GeneratorStates()
    given = _request_dataloader(trainer.fit_loop._data_source)
    combined = given if isinstance(given, CombinedLoader) else CombinedLoader(given, "max_size_cycle")
    combined.flattened = [
        _process_dataloader(trainer, TrainerFn.FITTING, RunningStage.TRAINING, each) for each in combined.flattened
    ]
    loaders: list[Any] = combined.flattened
    generators = [(generator, generator.get_state()) for loader in loaders for generator in _generators(loader)]
    try:
        batches = [batch for batch, _, _ in islice(iter(combined), count)]
        yield batches, {_batch_size(loader) for loader in loaders}
    finally:
        combined.reset()
        _close(loaders)
        for generator, state in generators:
            generator.set_state(state)
        states.restore()


class EarlyLoaders:
    """Lets a fit that has made its training loaders early make them anew, with the random numbers of the first time.

    A scheduler that asks for `Trainer.estimated_stepping_batches` has them made in ``configure_optimizers``. In place
    from construction to `make_anew` or `close`. Loaders' own generators are drawn from a second time.

    Args:
        trainer: Whose fit is being set up.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._loop: Any = trainer.fit_loop
        self._before: GeneratorStates | None = None
        self._loop.__dict__["setup_data"] = self._setup_data

    def steps(self) -> float | None:
        """How many steps a scheduler has been told of, or would be now; None if no loaders have been made."""
        return None if self._before is None else self._trainer.estimated_stepping_batches

    def make_anew(self) -> None:
        """Makes them, if they have been made; random numbers go on as if that had not been done twice."""
        self.close()
        if self._loop._combined_loader is None:
            return
        assert self._before is not None
        if self._loop._data_fetcher is not None:
            self._loop._data_fetcher.teardown()
        _close(self._loop._combined_loader.flattened)
        self._loop._combined_loader = None
        now = GeneratorStates()
        self._before.restore()
        self._loop.setup_data()
        now.restore()

    def close(self) -> None:
        """Leaves the loop as it was."""
        self._loop.__dict__.pop("setup_data", None)

    def _setup_data(self) -> None:
        if self._before is None:
            self._before = GeneratorStates()
        type(self._loop).setup_data(self._loop)


def _close(loaders: list[Any]) -> None:
    """Ends the workers of those that Lightning does not know."""
    for loader in loaders:
        if isinstance(loader, SharedMemoryLoader):
            loader.close()


def _generators(loader: Any) -> Iterator[torch.Generator]:
    sampler = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    for holder in (loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            yield generator


def _batch_size(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None
