"""Slots: never two owners of one byte, leases that last as long as anything made from them, bounded numbers."""

import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from lightning_hpc.data.mapping import PAGE, SharedMapping
from lightning_hpc.data.ring import Slot, SlotRing


def under_inference_mode(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.view(-1)[1:]


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda tensor: tensor,
    "detach": Tensor.detach,
    "data": lambda tensor: tensor.data,
    "slice": lambda tensor: tensor[-1:],
    "unbind": lambda tensor: tensor.unbind()[-1],
    "as_strided": lambda tensor: tensor.as_strided((2, *tensor.shape), (0, *tensor.stride())),
    "numpy": Tensor.numpy,
    "numpy slice": lambda tensor: tensor.numpy()[::2],
    "memoryview": lambda tensor: tensor.numpy().data,
    "inference_mode": under_inference_mode,
    "dlpack": from_dlpack,
    "dlpack of numpy": np.from_dlpack,
    "dlpack capsule": lambda tensor: tensor.__dlpack__(),
    "storage": Tensor.untyped_storage,
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "graph": lambda tensor: (torch.ones(tensor.shape, requires_grad=True) * tensor).sum(),
}


def new_ring(limit: int = 4) -> SlotRing:
    return SlotRing(SharedMapping(), limit)


def is_free(ring: SlotRing, slot: Slot) -> bool:
    ring._collect()
    return slot in ring._free


def test_slots_have_room_for_the_batch_only_after_its_size_is_known() -> None:
    ring = new_ring()
    assert (ring.slot_bytes, ring.take().capacity) == (0, 0)
    ring.fit(3 * PAGE)
    assert 3 * PAGE <= ring.slot_bytes <= 4 * PAGE
    assert ring.take().capacity == ring.slot_bytes
    ring.fit(PAGE)
    assert ring.slot_bytes >= 3 * PAGE


def test_a_slot_is_used_again_when_it_was_given_back() -> None:
    ring = new_ring()
    ring.fit(100)
    slot = ring.take()
    assert ring.take() != slot
    ring.give_back(slot)
    assert ring.take() == slot
    assert ring.count == 2


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_a_lease_lasts_as_long_as_anything_made_from_it(holder: Callable[[Tensor], Any]) -> None:
    ring = new_ring()
    ring.fit(PAGE)
    slot = ring.take()
    tensor = torch.frombuffer(ring.lease(slot), dtype=torch.float32, count=8)
    held = holder(tensor)
    del tensor
    assert not is_free(ring, slot)
    del held
    assert is_free(ring, slot)


def test_a_lease_may_end_in_another_thread() -> None:
    ring = new_ring()
    ring.fit(PAGE)
    held: list[Tensor] = [torch.frombuffer(ring.lease(ring.take()), dtype=torch.uint8) for _ in range(20)]
    threads = [threading.Thread(target=held.pop) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ring._collect()
    assert len(ring._free) == 20


def test_a_batch_is_told_to_be_copied_out_where_it_would_take_the_last_slot() -> None:
    ring = new_ring(limit=3)
    ring.fit(PAGE)
    held: list[memoryview] = []
    for _ in range(3):
        slot = ring.take()
        assert not ring.is_scarce or len(held) == 2
        held.append(ring.lease(slot))
    assert ring.is_scarce
    held.pop()
    assert not ring.is_scarce


def test_slots_that_grow_use_the_range_of_those_that_were_smaller() -> None:
    ring = new_ring()
    size, slots = PAGE, 6
    while size < 2**12 * PAGE:
        ring.fit(size)
        for slot in [ring.take() for _ in range(slots)]:
            ring.give_back(slot)
        size = ring.slot_bytes + 1
    assert ring._end < 3 * slots * ring.slot_bytes


def test_a_batch_larger_than_the_range_is_an_error() -> None:
    ring = new_ring()
    ring.fit(ring._mapping.size)
    with pytest.raises(MemoryError, match="do not fit"):
        ring.take()


def test_no_byte_has_two_owners_whatever_happens() -> None:
    for seed in range(20):
        rng, ring = random.Random(seed), new_ring(limit=6)
        lent: list[Slot] = []
        leased: list[tuple[Slot, Any]] = []
        for _ in range(300):
            action = rng.randrange(5)
            if action == 0 and rng.random() < 0.1:
                ring.fit(rng.randrange(1, 40 * PAGE))
            elif action == 1 and lent:
                ring.give_back(lent.pop(rng.randrange(len(lent))))
            elif action == 2 and lent:
                slot = lent.pop(rng.randrange(len(lent)))
                leased.append((slot, ring.lease(slot)))
            elif action == 3 and leased:
                leased.pop(rng.randrange(len(leased)))
            elif len(lent) + len(leased) < 30 and (slot := ring.take()).capacity:
                lent.append(slot)
            owned = sorted([*lent, *(slot for slot, _ in leased), *ring._holes], key=lambda slot: slot.offset)
            assert all(one.offset + one.capacity <= other.offset for one, other in itertools.pairwise(owned))
            assert all(slot.offset >= PAGE and slot.offset + slot.capacity <= ring._end for slot in owned)
