"""`SavedActivations`: how many bytes autograd keeps for backward, exactly, over the course of a step."""

import itertools
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks
from typing_extensions import Self

from lightning_hpc.memory.saved_tensor import SavedTensor


@dataclass(eq=False)
class Holding:
    """One reference to a storage that lasts for a part of the step.

    Attributes:
        storage: Number of the storage; holdings of the same one share its bytes.
        nbytes: Size of the whole storage: a view keeps all of it.
        start: When it began, on a clock that counts beginnings and ends.
        end: When it ended; None while it lasts.
        block: The block that it depends on; None if on none.
        when: ``"checkpointed"`` or ``"plain"`` if it is there only when `block` is, else ``"always"``.
    """

    storage: int
    nbytes: int
    start: int
    end: int | None = None
    block: str | None = None
    when: Literal["always", "plain", "checkpointed"] = "always"


class SavedActivations:
    """Measures what autograd saves while the context is entered, on any device; it computes nothing by itself.

    A storage counts once, with all its bytes, from when the first tensor on it is saved until autograd has let go of
    the last one: that is when its node has run backward, or when the graph is dropped. Parameters, buffers and
    whatever else lives anyway are given as ``alive_anyway`` and do not count. Casts that autocast makes of parameters
    do. What a custom function keeps by other means than ``save_for_backward`` is not seen, nor is what a checkpoint
    of the user's own brings back in backward; that of `CheckpointedBlocks` is, if it watches for this object.

    Usage::

        with SavedActivations([*model.parameters(), *model.buffers(), *batch]) as saved:
            model(*batch).sum().backward()
        print(saved.peak_bytes)

    Args:
        alive_anyway: Tensors whose storages do not count.

    Attributes:
        holdings: All references so far, in the order of their beginnings.

    Raises:
        RuntimeError: In backward, if a saved tensor has been changed in place, as PyTorch does by itself otherwise.
    """

    def __init__(self, alive_anyway: Iterable[Tensor] = ()) -> None:
        self.holdings: list[Holding] = []
        self._clock = itertools.count()
        self._numbers = itertools.count()
        # PyTorch keeps a storage's Python object for as long as the storage lives. Unlike the address, that is an
        # identity which no later storage can take over.
        self._storages: weakref.WeakKeyDictionary[UntypedStorage, int | None] = weakref.WeakKeyDictionary()
        for tensor in alive_anyway:
            self._storages.update(dict.fromkeys(_storages_of(tensor)))
        self._hooks = saved_tensors_hooks(self._pack, _Saved.unpack)

    @property
    def live_bytes(self) -> int:
        """Bytes saved now."""
        alive = (holding for holding in self._own() if holding.end is None)
        return sum({holding.storage: holding.nbytes for holding in alive}.values())

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were saved at one time."""
        events = [(holding.start, 1, holding) for holding in self._own()]
        events += [(holding.end, -1, holding) for holding in self._own() if holding.end is not None]
        references: dict[int, int] = {}
        live = peak = 0
        for _, change, holding in sorted(events, key=lambda event: event[0]):
            before = references.get(holding.storage, 0)
            references[holding.storage] = before + change
            if min(before, before + change) == 0:
                live += change * holding.nbytes
                peak = max(peak, live)
        return peak

    def hold(
        self, tensor: Tensor, block: str | None = None, when: Literal["always", "plain", "checkpointed"] = "always"
    ) -> list[Holding]:
        """Notes the beginning of references to the storages of ``tensor`` that count."""
        holdings = [
            Holding(number, storage.nbytes(), next(self._clock), None, block, when)
            for storage in _storages_of(tensor)
            if storage.nbytes() and (number := self._number(storage)) is not None
        ]
        self.holdings += holdings
        return holdings

    def release(self, holdings: Iterable[Holding]) -> None:
        """Notes their end."""
        for holding in holdings:
            holding.end = next(self._clock)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, traceback)

    def _own(self) -> Iterator[Holding]:
        """The references that there really are: not those that there would be without checkpointing."""
        return (holding for holding in self.holdings if holding.when != "plain")

    def _number(self, storage: UntypedStorage) -> int | None:
        if storage not in self._storages:
            self._storages[storage] = next(self._numbers)
        return self._storages[storage]

    def _pack(self, tensor: Tensor) -> "_Saved":
        return _Saved(self, tensor)


class _Saved(SavedTensor):
    """A saved tensor as autograd holds it; it ends with autograd's reference."""

    def __init__(self, recorder: SavedActivations, tensor: Tensor) -> None:
        super().__init__(tensor)
        self._recorder = recorder
        self._holdings = recorder.hold(tensor)

    def __del__(self) -> None:
        self._recorder.release(self._holdings)


def _storages_of(tensor: Tensor) -> list[UntypedStorage]:
    if hasattr(tensor, "__tensor_flatten__"):  # a wrapper such as DTensor
        names, _ = tensor.__tensor_flatten__()
        return [storage for name in names for storage in _storages_of(getattr(tensor, name))]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [part.untyped_storage() for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values())]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [part.untyped_storage() for part in (tensor.ccol_indices(), tensor.row_indices(), tensor.values())]
    return [tensor.untyped_storage()]
