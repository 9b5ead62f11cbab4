"""Where a loader is in its epoch, and how it gets there again."""

import contextlib
import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_hpc.data.fetching import epoch_of

FORMAT = "lightning_hpc.loader/1"


@runtime_checkable
class Resumable(Protocol):
    """A sampler, batch sampler or iterable dataset that finds any place of an epoch by itself.

    If it has a length, that of a sampler or dataset is what is left of the epoch; that of a batch sampler counts the
    batches before the place, too.
    """

    def state_dict(self, consumed: int = 0) -> dict[str, Any]:
        """The place after so many more of the items that it gives: samples, or batches."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Goes there, with the next iteration."""


@dataclass
class Position:
    """A place in an epoch: what the epoch began with, and how many batches were consumed since.

    Its size does not depend on the number of samples.

    Attributes:
        generator: State of the generator that orders are drawn from, before anything was drawn for the epoch.
        generator_now: Its present state, which the next epoch begins with; None if it is PyTorch's own.
        seed: For what is random in samples; None if it is still to be drawn.
        order: State of the `Resumable` that gives the order, at this place; None if there is none.
        earlier: Batches of this epoch, on each rank, that ``order`` has behind it.
        batches: Batches that are to be passed by, where there is none.
        is_over: Whether that is all of the epoch.
        shares: Into how many parts the samples are split by what cannot go on with another number: the workers of an
            iterable dataset, or the ranks of a sampler, where ``order`` is None.
    """

    generator: Tensor
    seed: int | None = None
    order: dict[str, Any] | None = None
    earlier: int = 0
    batches: int = 0
    is_over: bool = False
    shares: int = 1
    generator_now: Tensor | None = None

    @property
    def total(self) -> int:
        """Batches of this epoch that were consumed."""
        return self.earlier + self.batches

    def to_dict(self) -> dict[str, Any]:
        """Plain values and one or two tensors of 5 KB."""
        return {"format": FORMAT, **vars(self)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "Position":
        """Reads `to_dict`.

        Raises:
            ValueError: If it is something else.
        """
        names = {field.name for field in fields(cls)}
        if state.get("format") != FORMAT or state.keys() != names | {"format"}:
            raise ValueError(
                f"the state with the keys {sorted(state)} was not saved by a SharedMemoryLoader of this version; begin"
                " the epoch anew without it"
            )
        return cls(**{name: state[name] for name in names})


def resumable_of(loader: DataLoader[Any]) -> tuple[Resumable, int] | None:
    """What gives a loader's order and finds its place by itself, and how many of its items make a batch."""
    candidates: list[tuple[Any, int]] = [
        (loader.batch_sampler, 1),
        (loader.sampler, loader.batch_size or 1),
        (loader.dataset, loader.batch_size or 1),
    ]
    return next(((candidate, items) for candidate, items in candidates if _is_resumable(candidate)), None)


def _is_resumable(candidate: Any) -> bool:
    """Whether it has the methods of a `Resumable`, and not others of the same names, which take no count."""
    if not isinstance(candidate, Resumable):
        return False
    try:
        inspect.signature(candidate.state_dict).bind(0)
    except TypeError:
        return False
    return True


def shares_of(loader: DataLoader[Any]) -> int:
    """See `Position.shares`."""
    if resumable_of(loader) is not None:
        return 1
    if isinstance(loader.dataset, IterableDataset):
        return max(loader.num_workers, 1)
    return loader.sampler.num_replicas if isinstance(loader.sampler, DistributedSampler) else 1


def require_same_shares(loader: DataLoader[Any], position: Position) -> None:
    """Raises where samples would be lost or come twice.

    Raises:
        ValueError: If the position is that of another number of workers or ranks.
    """
    shares = shares_of(loader)
    if position.is_over or position.shares == shares:
        return
    what = "num_workers" if isinstance(loader.dataset, IterableDataset) else "ranks"
    raise ValueError(
        f"the state was saved within an epoch with {what}={position.shares}, and other samples would follow with"
        f" {what}={shares}; go on with the same number, from a checkpoint at the end of an epoch, or with a sampler or"
        " dataset that finds its place itself, as ElasticSampler and TarShardDataset"
    )


def go_to(loader: DataLoader[Any], order: dict[str, Any]) -> None:
    """Lets what gives a loader's order begin at one of its states.

    Raises:
        ValueError: If the loader has nothing that finds its place, or only with other samples.
    """
    found = resumable_of(loader)
    if found is None:
        raise ValueError(
            "the state was saved with a sampler or dataset that finds its place by itself, and this loader has none;"
            " use the same kind, or begin the epoch anew without the state"
        )
    found[0].load_state_dict(order)


def go_behind(loader: DataLoader[Any], order: dict[str, Any]) -> None:
    """Lets what gives a loader's order begin the epoch after one of its states, if it knows of epochs.

    Raises:
        ValueError: As `go_to`.
    """
    found: Any = resumable_of(loader)
    if found is None:
        go_to(loader, order)
    elif isinstance(order.get("epoch"), int) and hasattr(found[0], "set_epoch"):
        found[0].load_state_dict(order)
        found[0].set_epoch(order["epoch"] + 1)


def sampler_of(loader: DataLoader[Any]) -> Any:
    """What gives the order; beside a given batch sampler, ``loader.sampler`` is one that nobody asks."""
    return loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)


def told_epoch(loader: DataLoader[Any]) -> tuple[Any, Any]:
    """The epochs that a loader's sampler and its dataset have been told; None for what takes none."""
    order = order_state(loader)
    told = getattr(sampler_of(loader), "epoch", None) if order is None else order.get("epoch")
    return told, epoch_of(loader.dataset)


def batches_left(loader: DataLoader[Any], earlier: int) -> int:
    """Batches of the epoch that a loader whose order has gone to a place has yet to give.

    Args:
        loader: One with a length.
        earlier: Batches before that place.
    """
    found: Any = resumable_of(loader)
    return DataLoader.__len__(loader) - (earlier if found is not None and found[0] is loader.batch_sampler else 0)


def length_of(loader: DataLoader[Any]) -> int | None:
    """Batches of an epoch; None if nobody knows."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def advanced(loader: DataLoader[Any], position: Position, batches: int) -> Position:
    """A position some batches further."""
    found = resumable_of(loader)
    if position.order is None or found is None:
        return replace(position, batches=position.batches + batches)
    resumable, items = found
    now = resumable.state_dict()
    if now != position.order:  # it has been told the next epoch already
        resumable.load_state_dict(position.order)
    order = resumable.state_dict(batches * items)
    if now != position.order:
        resumable.load_state_dict(now)
    return replace(position, order=order, earlier=position.earlier + batches)


def order_state(loader: DataLoader[Any]) -> dict[str, Any] | None:
    """The state at the beginning of an epoch of what gives a loader's order; None if that has none."""
    found = resumable_of(loader)
    return None if found is None else found[0].state_dict()


def skip(indices: Iterator[Any], count: int) -> Iterator[Any]:
    """The indices behind the first ``count``. Draws what the sampler draws for the next one already."""
    for _ in itertools.islice(indices, count):
        pass
    return itertools.chain(list(itertools.islice(indices, 1)), indices)


def order_generator(loader: DataLoader[Any]) -> torch.Generator | None:
    """The generator that a loader's order is drawn from; None if that is PyTorch's own."""
    given = getattr(loader.sampler, "generator", None) if loader.generator is None else loader.generator
    assert given is None or isinstance(given, torch.Generator)
    return given


@contextlib.contextmanager
def generator_at(generator: torch.Generator | None, state: Tensor, is_restored: bool = True) -> Iterator[None]:
    """Puts a generator, PyTorch's own if None, into another state, for a while if ``is_restored``."""
    before = generator_state(generator)
    set_generator_state(generator, state.cpu())
    try:
        yield
    finally:
        if is_restored:
            set_generator_state(generator, before)


def generator_state(generator: torch.Generator | None) -> Tensor:
    """The state of a generator, PyTorch's own if None."""
    return (generator or torch.default_generator).get_state()


def set_generator_state(generator: torch.Generator | None, state: Tensor) -> None:
    """Sets the state of a generator, PyTorch's own if None."""
    (generator or torch.default_generator).set_state(state)
