"""`UnitMeter`: counts what each unit's forward saves for backward."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from lightning_hpc.memory.saved_tensor import outer_hooks


class UnitMeter:
    """Counts storages, each once, for the unit that saves it first. It changes no result.

    What a checkpointed unit saves counts too: it has it when it is recomputed.

    Args:
        alive_anyway: Tensors whose storages do not count: parameters and buffers.

    Attributes:
        saved: Bytes by unit.
        saved_float32: Those of them that are float32.
        inputs: Elements that the unit was given.
    """

    def __init__(self, alive_anyway: Iterable[Tensor]) -> None:
        self.saved: Counter[str] = Counter()
        self.saved_float32: Counter[str] = Counter()
        self.inputs: Counter[str] = Counter()
        # PyTorch keeps a storage's Python object for as long as the storage lives.
        self._seen: weakref.WeakSet[UntypedStorage] = weakref.WeakSet()
        for tensor in alive_anyway:
            if tensor.layout is torch.strided:
                self._seen.add(tensor.untyped_storage())

    @contextmanager
    def unit(self, name: str, inputs: Iterable[Tensor]) -> Iterator[None]:
        """Round the forward of a unit, which is given ``inputs``."""
        self.inputs[name] += sum(tensor.numel() for tensor in inputs)
        pack_outside, unpack_outside = outer_hooks()

        def pack(tensor: Tensor) -> object:
            self._count(name, tensor)
            return pack_outside(tensor)

        with saved_tensors_hooks(pack, unpack_outside):
            yield

    def _count(self, name: str, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
            return  # sparse, or a wrapper: nothing that autocast makes smaller
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        self._seen.add(storage)
        self.saved[name] += storage.nbytes()
        if tensor.dtype is torch.float32:
            self.saved_float32[name] += storage.nbytes()
