"""Batches in slots: tensors and arrays lie in the slot, the rest of the batch in a small pickle that refers to them.

Any nesting of anything picklable can be a batch. A tensor that was made in the slot in the first place, as by
`SlotCollate`, is not copied; others are, once. The reader makes tensors over the slot's memory without copying.
"""

import io
import math
import pickle
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

_ALIGNMENT = 64  # a cache line, and what vector instructions and copies to a device like best
_SMALL = 2048
"""Bytes up to which a tensor is copied out: whoever collects labels or losses must not hold whole batches by it."""

_PROTOCOL = pickle.HIGHEST_PROTOCOL


class SlotTooSmallError(Exception):
    """A batch does not fit into its slot.

    Attributes:
        needed: Bytes that it takes.
    """

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


class SlotWriter:
    """Where a worker puts the tensors of one batch.

    Args:
        memory: The whole mapping, uint8.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._base = memory.data_ptr()
        self.open(0, 0)

    def open(self, offset: int, capacity: int) -> None:
        """Begins a batch in another slot."""
        self._start, self._capacity, self.used = offset, capacity, 0

    def restart(self) -> None:
        """Begins the batch anew."""
        self.used = 0

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None
    ) -> Tensor | None:
        """An uninitialised tensor, not empty, in the slot; None if it does not fit, though its size counts as used."""
        numel = math.prod(shape)
        start = -(-self.used // _ALIGNMENT) * _ALIGNMENT
        self.used = start + numel * dtype.itemsize
        if self.used > self._capacity:
            return None
        place = self._memory[self._start + start : self._start + self.used].view(dtype)
        return place.view(shape) if strides is None else place.as_strided(shape, strides)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Where in the slot a tensor lies that was made by `empty`; None if it was not."""
        offset = tensor.data_ptr() - self._base - self._start
        return offset if 0 <= offset < self._capacity else None

    def pack(self, batch: Any) -> bytes:
        """Puts a batch into the slot.

        Returns:
            What `unpack` needs beside the slot.

        Raises:
            SlotTooSmallError: If it does not fit.
        """
        stream = io.BytesIO()
        _BatchPickler(stream, self).dump(batch)
        if self.used > self._capacity:
            # Once more, only to learn what it takes: what lies in the slot already has been counted, too.
            self.open(self._start, 0)
            _BatchPickler(io.BytesIO(), self).dump(batch)
            raise SlotTooSmallError(self.used)
        return stream.getvalue()

    def append(self, data: bytes) -> int:
        """Puts bytes behind the tensors, and returns where in the slot.

        Raises:
            SlotTooSmallError: If they do not fit.
        """
        place = self.empty((len(data),), torch.uint8)
        if place is None:
            raise SlotTooSmallError(self.used)
        place.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return self.used - len(data)


def unpack(packed: bytes | memoryview, slot: memoryview, copied: bool = False) -> Any:
    """The batch that `SlotWriter.pack` has put into a slot.

    Args:
        packed: What that has returned.
        slot: The slot's memory. Large tensors keep it alive.
        copied: Whether they are copied, so that they do not.
    """
    return _BatchUnpickler(io.BytesIO(packed), slot, copied).load()


def copy_out(batch: Any, numel: int) -> Any:
    """A copy of a batch in memory of its own; `numel` is what `SlotTooSmallError` says."""
    memory = torch.empty(numel, dtype=torch.uint8)
    writer = SlotWriter(memory)
    writer.open(0, numel)
    return unpack(writer.pack(batch), memory.numpy().data)


class _BatchPickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, writer: SlotWriter) -> None:
        super().__init__(stream, _PROTOCOL)
        self._writer = writer

    @override
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return self._reduce_tensor(obj)
        if type(obj) is np.ndarray and not obj.dtype.hasobject and obj.nbytes > _SMALL:
            return self._reduce_array(obj)
        return NotImplemented

    def _reduce_tensor(self, tensor: Tensor) -> Any:
        kind = type(tensor)
        if kind is not Tensor:
            if not _is_plain(tensor) or kind.__reduce_ex__ is not Tensor.__reduce_ex__:
                return NotImplemented
            plain = tensor.as_subclass(Tensor)
            # A subclass that wraps other tensors has no memory of its own, and cannot be taken off.
            return (_as_subclass, (plain, kind, tensor.__dict__)) if type(plain) is Tensor else NotImplemented
        if not _is_plain(tensor):
            return NotImplemented
        if not tensor.numel():
            return _empty, (tuple(tensor.shape), tensor.dtype)
        offset = self._writer.offset_of(tensor)
        if offset is None:
            strides = tensor.stride() if _is_dense(tensor) else None
            place = self._writer.empty(tuple(tensor.shape), tensor.dtype, strides)
            if place is None:
                return _empty, ((0,), tensor.dtype)  # the whole batch will be packed again
            offset = self._writer.offset_of(place.copy_(tensor))
            tensor = place
        strides = None if tensor.is_contiguous() else tensor.stride()
        return _tensor_in_slot, (offset, tuple(tensor.shape), tensor.dtype, strides)

    def _reduce_array(self, array: NDArray[Any]) -> Any:
        place = self._writer.empty((array.nbytes,), torch.uint8)
        if place is None:
            return _empty, ((0,), torch.uint8)  # the whole batch will be packed again
        order: Literal["C", "F"] = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        target: NDArray[Any] = np.ndarray(array.shape, array.dtype, place.numpy(), order=order)
        target[...] = array
        return _array_in_slot, (self._writer.offset_of(place), array.shape, array.dtype, order)


class _BatchUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, slot: memoryview, copied: bool) -> None:
        super().__init__(stream)
        # Not methods: the unpickler would refer to itself by them, and hold the slot until the garbage collector runs.
        self._inside = {
            "_tensor_in_slot": partial(_tensor_in_slot, slot, copied),
            "_array_in_slot": partial(_array_in_slot, slot, copied),
        }

    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == __name__ and global_name in self._inside:
            return self._inside[global_name]
        return super().find_class(module_name, global_name)


def _tensor_in_slot(
    slot: memoryview,
    copied: bool,
    offset: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    strides: tuple[int, ...] | None,
) -> Tensor:
    extent = math.prod(shape)
    if strides is not None:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    flat = torch.frombuffer(slot, dtype=dtype, count=extent, offset=offset)
    if copied or extent * dtype.itemsize <= _SMALL:
        flat = flat.clone()
    return flat.view(shape) if strides is None else flat.as_strided(shape, strides)


def _array_in_slot(
    slot: memoryview, copied: bool, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], order: Literal["C", "F"]
) -> NDArray[Any]:
    numel = math.prod(shape) * dtype.itemsize
    # By way of a tensor: an array made from a view keeps what is under the view, but not the view, and ends the lease.
    memory = torch.frombuffer(slot, dtype=torch.uint8, count=numel, offset=offset).numpy()
    array: NDArray[Any] = np.ndarray(shape, dtype, memory, order=order)
    return array.copy(order) if copied else array


def _is_plain(tensor: Tensor) -> bool:
    """Whether shape, strides, dtype and memory are all there is to it; others are pickled as PyTorch does it."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_nested)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill their memory without gaps or overlaps, in whatever order."""
    dims = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)
    expected = 1
    for stride, size in dims:
        if stride != expected:
            return False
        expected *= size
    return True


def _as_subclass(plain: Tensor, kind: type[Tensor], attributes: dict[str, Any]) -> Tensor:
    tensor = plain.as_subclass(kind)
    tensor.__dict__.update(attributes)
    return tensor


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)
