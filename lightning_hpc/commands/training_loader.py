"""The loader that a user trains with, and the same with other numbers of workers."""

import copy
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from lightning_hpc.commands.data_result import OWN, PEER
from lightning_hpc.data import OperatorGraph, SharedMemoryLoader, place

T = TypeVar("T")

_PREFETCH = 2  # DataLoader's own default, which it has with workers only


class TrainingLoader:
    """Makes a user's loader again.

    Args:
        loader: Of the user. It is never iterated over itself.

    Attributes:
        names: What can be made: ``DataLoader``, and ``SharedMemoryLoader`` unless the user's class is one of its own.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.names = (PEER, OWN) if type(loader) in (DataLoader, SharedMemoryLoader) else (PEER,)

    @property
    def dataset(self) -> Any:
        """What is read."""
        return self._loader.dataset

    @property
    def kind(self) -> type:
        """The user's class."""
        return type(self._loader)

    def make(self, name: str, workers: int) -> DataLoader[Any]:
        """A new loader, with all other arguments as the user has given them."""
        if name == OWN:
            return SharedMemoryLoader(self.dataset, operators=self._worker_part(), **self._arguments(workers))
        if isinstance(self._loader, SharedMemoryLoader):
            arguments, graph = self._arguments(workers), self._worker_part()
            if graph is not None:
                is_batched = self._loader.batch_sampler is not None
                arguments["collate_fn"] = partial(_apply_and_collate, graph, arguments["collate_fn"], is_batched)
            return DataLoader(self.dataset, **arguments)
        made = copy.copy(self._loader)  # of the user's own class, whatever its constructor is like
        made.num_workers = workers
        made.prefetch_factor = self._prefetch_factor(workers)
        made.timeout = self._loader.timeout if workers else 0
        return made

    def _worker_part(self) -> OperatorGraph | None:
        """What workers do of the user's operators; what a device does of them is not measured, with either loader."""
        operators = getattr(self._loader, "operators", None)
        return None if operators is None else place(operators, has_device=False).worker

    def _arguments(self, workers: int) -> dict[str, Any]:
        names = ("collate_fn", "worker_init_fn", "generator", "pin_memory", "in_order")
        arguments = {name: getattr(self._loader, name) for name in names}
        arguments.update(num_workers=workers, prefetch_factor=self._prefetch_factor(workers), **self._sampling())
        if workers:
            arguments.update(timeout=self._loader.timeout, multiprocessing_context=self._loader.multiprocessing_context)
        return arguments

    def _sampling(self) -> dict[str, Any]:
        loader = self._loader
        if loader.batch_sampler is not None and loader.batch_size is None:  # it was given by the user
            return {"batch_sampler": loader.batch_sampler}
        sizes = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        return sizes if isinstance(loader.dataset, IterableDataset) else {"sampler": loader.sampler, **sizes}

    def _prefetch_factor(self, workers: int) -> int | None:
        return (self._loader.prefetch_factor or _PREFETCH) if workers else None


def _apply_and_collate(graph: OperatorGraph, collate_fn: Callable[[Any], Any], is_batched: bool, samples: Any) -> Any:
    return collate_fn([graph(sample) for sample in samples] if is_batched else graph(samples))


def make_training_loader(data: LightningDataModule | DataLoader[Any]) -> tuple[TrainingLoader, list[str]]:
    """What a fit would read, made without a Trainer.

    Returns:
        The loader, and what the user should know of it, a sentence each.

    Raises:
        RuntimeError: If the user's code raises, with the place.
        TypeError: If there is no `DataLoader`.
    """
    if isinstance(data, DataLoader):
        return _choose(data)
    named = f"{type(data).__name__}."
    _call(f"{named}prepare_data()", data.prepare_data)
    _call(f"{named}setup('fit')", lambda: data.setup("fit"))
    return _choose(_call(f"{named}train_dataloader()", data.train_dataloader))


def place_of(error: BaseException) -> str:
    """Where an error was raised: ``"data.py:12 in __getitem__"``."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"


def _choose(found: Any) -> tuple[TrainingLoader, list[str]]:
    loaders = found.flattened if isinstance(found, CombinedLoader) else tree_leaves(found)
    if not loaders or not isinstance(loaders[0], DataLoader):
        what = type(loaders[0]).__name__ if loaders else "nothing"
        raise TypeError(
            f"train_dataloader() returned {what}, whose number of workers cannot be changed from outside; return a"
            " torch.utils.data.DataLoader, or a list, dict or CombinedLoader of them"
        )
    loader = TrainingLoader(loaders[0])
    return loader, _remarks(loader, len(loaders))


def _remarks(loader: TrainingLoader, count: int) -> list[str]:
    remarks = []
    if count > 1:
        remarks.append(
            f"train_dataloader() returned {count} loaders, of which the first is measured; return another one alone to"
            " measure that."
        )
    if OWN not in loader.names:
        remarks.append(
            f"The loader is a {loader.kind.__name__}, which may read in a way of its own: SharedMemoryDataModule leaves"
            f" it as it is, and {OWN} is not measured."
        )
    if isinstance(loader.dataset, IterableDataset):
        remarks.append(
            "The dataset is iterable: unless it looks at get_worker_info(), each worker reads all of it, and samples"
            " are counted as often as they are read."
        )
    return remarks


def _call(name: str, function: Callable[[], T]) -> T:
    try:
        return function()
    except Exception as error:
        hint = "; self.trainer is None here, since nothing is trained" if "NoneType" in str(error) else ""
        raise RuntimeError(f"{name} failed: {type(error).__name__}: {error} ({place_of(error)}){hint}") from error
