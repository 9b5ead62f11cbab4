"""What is packed comes back bit by bit, in a slot of exactly the size that was asked for, and keeps its slot alive."""

import datetime
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor  # a subclass that wraps others

from lightning_hpc.data.packing import SlotTooSmallError, SlotWriter, copy_out, unpack
from tests.data.datasets import Point, assert_same

_SIZE, _START = 2**22, 4096

DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool, torch.complex64, torch.complex128),
    *(torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]


class Tagged(Tensor):
    tag: Any


class OwnPickle(Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _own, (self.as_subclass(Tensor).numpy(),)


def _own(array: Any) -> Tensor:
    return torch.from_numpy(array * 2).as_subclass(OwnPickle)


def tagged() -> Tagged:
    tensor = torch.arange(3000).as_subclass(Tagged)
    tensor.tag = {"a": [1]}
    return tensor


def numbers(count: int = 5000) -> Tensor:
    return torch.arange(count, dtype=torch.float32)


UNUSUAL: dict[str, Callable[[], Any]] = {
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: (torch.empty(0, 3), torch.empty(3, 0, dtype=torch.bool)),
    "with gaps": lambda: numbers().view(50, 100)[:, ::3],
    "expanded": lambda: numbers(50)[:, None].expand(50, 100),
    "requires_grad": lambda: numbers().requires_grad_(),
    "parameter": lambda: torch.nn.Parameter(numbers()),
    "conjugated": lambda: torch.complex(numbers(), -numbers()).conj(),
    "negated": lambda: torch.complex(numbers(), -numbers()).conj().imag,
    "sparse": lambda: torch.eye(400).to_sparse(),
    "subclass": tagged,
    "array with gaps": lambda: np.arange(9000).reshape(90, 100)[:, ::2],
    "array backwards": lambda: np.arange(3000.0)[::-1],
    "array of records": lambda: np.array([(1, 2.5)] * 1000, dtype=[("a", "i4"), ("b", "f8")]),
    "array of dates": lambda: np.arange(1000).astype("M8[s]"),
    "array of text": lambda: np.array(["abc", "d"] * 500),
    "other byte order": lambda: np.arange(3000, dtype=">i4"),
    "small array": lambda: np.arange(3),
    "masked array": lambda: np.ma.masked_array(np.arange(3000), mask=[False, True] * 1500),
    "no tensors": lambda: (None, 1.5, "s", b"b", {1}, datetime.date(2020, 1, 1), range(3), torch.float32, np.int8(3)),
    "nested": lambda: {"a": [numbers(), ("x", Point(numbers(3), None))], 5: {"b": {}}},
}


class Slotted:
    """A slot, with all that surrounds it filled, so that nothing is written there unseen."""

    def __init__(self, capacity: int = 2**21) -> None:
        self.memory = torch.full((_SIZE,), 77, dtype=torch.uint8)
        self.capacity = capacity
        self.writer = SlotWriter(self.memory)
        self.writer.open(_START, capacity)

    def view(self) -> memoryview:
        return memoryview(self.memory.numpy())[_START : _START + self.capacity]  # type: ignore[arg-type]

    def round_trip(self, batch: Any, copied: bool = False) -> Any:
        packed = self.writer.pack(batch)
        around = torch.cat([self.memory[:_START], self.memory[_START + self.capacity :]])
        assert torch.equal(around, torch.full_like(around, 77))
        return unpack(packed, self.view(), copied)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype, copied: bool) -> None:
    tensor = torch.arange(5000).remainder(2).to(dtype)
    assert_same(Slotted().round_trip([tensor, tensor[:3]], copied), [tensor, tensor[:3]])


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
def test_whatever_a_batch_may_hold(make: Callable[[], Any], copied: bool) -> None:
    assert_same(Slotted().round_trip(make(), copied), make())


@pytest.mark.parametrize("copied", [False, True])
def test_strides_without_gaps_are_kept(copied: bool) -> None:
    images = torch.randn(2, 3, 20, 30).to(memory_format=torch.channels_last)
    matrix, fortran = numbers().view(50, 100).T, np.asfortranarray(np.arange(9000.0).reshape(90, 100))
    back = Slotted().round_trip([images, matrix, fortran], copied)
    assert back[0].is_contiguous(memory_format=torch.channels_last)
    assert back[1].stride() == matrix.stride()
    assert back[2].flags.f_contiguous
    assert_same(back, [images, matrix, fortran])


def test_attributes_of_a_subclass_and_its_own_way_of_pickling_are_kept() -> None:
    assert Slotted().round_trip(tagged()).tag == {"a": [1]}
    assert_same(Slotted().round_trip(numbers().as_subclass(OwnPickle)), (numbers() * 2).as_subclass(OwnPickle))


def test_a_subclass_that_wraps_tensors() -> None:
    back = Slotted().round_trip(TwoTensor(numbers(), -numbers()))
    assert_same([back.a, back.b], [numbers(), -numbers()])


def test_one_object_twice_stays_one_object() -> None:
    tensor, array = numbers(), np.arange(5000)
    back = Slotted().round_trip([tensor, {"x": tensor}, array, array])
    assert back[0] is back[1]["x"]
    assert back[2] is back[3]


def test_tensors_and_arrays_can_be_written_to() -> None:
    tensor, array = Slotted().round_trip([numbers(), np.arange(5000)])
    tensor.zero_()
    array[:] = 0
    assert not tensor.any()
    assert not array.any()


@pytest.mark.parametrize("made", [numbers(), np.arange(5000)], ids=["tensor", "array"])
def test_what_is_large_keeps_the_slot_and_what_is_copied_or_small_does_not(made: Any) -> None:
    slot = Slotted()
    packed = slot.writer.pack([made, made[:20]])
    for copied, kept, is_alive in ((False, 0, True), (False, 1, False), (True, 0, False)):
        view = slot.view()
        lease = weakref.ref(view)
        held = unpack(packed, view, copied)[kept]
        del view
        gc.collect()
        assert (lease() is not None) == is_alive, (copied, kept)
        del held
    assert lease() is None


def test_a_slot_that_is_too_small_says_what_it_takes() -> None:
    batch = [numbers(), np.arange(3001), numbers(7)]
    with pytest.raises(SlotTooSmallError) as caught:
        Slotted(capacity=20_100).round_trip(batch)
    needed = caught.value.needed
    assert_same(Slotted(needed).round_trip(batch), batch)
    with pytest.raises(SlotTooSmallError):
        Slotted(needed - 1).round_trip(batch)


def test_tensors_that_were_made_in_the_slot_are_not_copied_again() -> None:
    slot = Slotted()
    place = slot.writer.empty((5000,), torch.float32)
    assert place is not None
    used = slot.writer.used
    place.copy_(numbers())
    assert_same(slot.round_trip({"a": place, "b": place[::2]}), {"a": numbers(), "b": numbers()[::2]})
    assert slot.writer.used == used


def test_a_batch_is_copied_out_of_a_slot_that_it_has_outgrown() -> None:
    slot = Slotted(capacity=20_100)
    place = slot.writer.empty((5000,), torch.float32)
    assert place is not None
    place.copy_(numbers())
    batch = {"a": place, "b": torch.randn(3000), "c": "text"}
    expected = {**batch, "a": numbers()}
    with pytest.raises(SlotTooSmallError) as caught:
        slot.writer.pack(batch)
    batch = copy_out(batch, caught.value.needed)
    slot.memory.fill_(77)  # as if somebody else had got it
    assert_same(Slotted(caught.value.needed).round_trip(batch), expected)


def test_bytes_are_appended_behind_the_tensors() -> None:
    slot = Slotted(capacity=20_100)
    packed = slot.writer.pack(numbers())
    start = slot.writer.append(b"xyz")
    assert bytes(slot.view()[start : start + 3]) == b"xyz"
    assert_same(unpack(packed, slot.view()), numbers())
    with pytest.raises(SlotTooSmallError) as caught:
        slot.writer.append(b"x" * 100)
    assert caught.value.needed > 20_100
