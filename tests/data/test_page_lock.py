"""Slots are page-locked for as long as they are slots, or somebody holds them; a refusal is said once."""

import gc
import os
import warnings
from typing import Any

import pytest
import torch

from lightning_hpc.data import page_lock
from lightning_hpc.data.mapping import PAGE, SharedMapping
from lightning_hpc.data.page_lock import PageLock
from lightning_hpc.data.ring import SlotRing
from tests.data.fake_cuda import FakeCuda

CUDA = torch.device("cuda")


def new_ring(limit: int = 4) -> SlotRing:
    mapping = SharedMapping()
    return SlotRing(mapping, limit, PageLock(mapping, CUDA))


def ranges(gpu: FakeCuda, ring: SlotRing) -> list[tuple[int, int]]:
    """What is locked, as offsets."""
    base = ring._mapping.as_tensor().data_ptr()
    return sorted((begin - base, end - base) for begin, end in gpu.registered.items())


def test_each_slot_is_locked_when_it_is_made_for_all_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, ring = FakeCuda().install(monkeypatch), new_ring()
    ring.take()
    assert not gpu.log  # workers start while no size is known
    ring.fit(3 * PAGE)
    slots = [ring.take() for _ in range(3)]
    expected = sorted((slot.offset, slot.offset + slot.capacity) for slot in slots)
    assert ranges(gpu, ring) == expected
    assert {entry[3] for entry in gpu.log} == {1}
    ring.give_back(slots[0])
    assert ring.take() == slots[0]
    assert len(gpu.log) == 3


def test_a_slot_is_unlocked_before_its_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, ring = FakeCuda().install(monkeypatch), new_ring()
    ring.fit(PAGE)
    slot = ring.take()
    held = ring.lease(ring.take())
    release = ring._mapping.release

    def checked(offset: int, numel: int) -> None:
        assert all(end <= offset or offset + numel <= begin for begin, end in ranges(gpu, ring))
        gpu.log.append(("release",))
        release(offset, numel)

    monkeypatch.setattr(ring._mapping, "release", checked)
    ring.give_back(slot)
    ring.fit(5 * PAGE)
    ring.take()
    assert [entry[0] for entry in gpu.log] == ["register", "register", "unregister", "release", "register"]
    del held
    ring.take()
    assert [entry[0] for entry in gpu.log][5:] == ["unregister", "release", "register"]
    assert len(gpu.registered) == 2


def test_all_is_unlocked_with_the_last_lease_while_it_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, ring = FakeCuda().install(monkeypatch), new_ring()
    ring.fit(PAGE)
    ring.take()
    held: Any = torch.frombuffer(ring.lease(ring.take()), dtype=torch.uint8)
    address = held.data_ptr()
    del ring
    gc.collect()
    assert len(gpu.registered) == 2

    def unregister(address: int) -> int:
        gpu.log.append(("mapped", is_mapped(address)))
        return FakeCuda.cudaHostUnregister(gpu, address)

    monkeypatch.setattr(gpu, "cudaHostUnregister", unregister)
    held = held.numpy()
    assert len(gpu.registered) == 2
    del held
    assert not gpu.registered
    assert gpu.log.count(("mapped", True)) == 2
    assert not is_mapped(address)


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        spans = [line.split()[0].split("-") for line in maps if "lightning_hpc" in line]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


def test_a_refusal_is_said_once_and_what_follows_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, ring = FakeCuda().install(monkeypatch), new_ring()
    ring.fit(2**20)
    ring.take()
    gpu.refusal = 1
    with pytest.warns(RuntimeWarning, match=r"page-lock 1 MiB .*error 1: operation not permitted.*lock more memory"):
        ring.take()
    assert [entry[0] for entry in gpu.log] == ["register", "register", "forget"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ring.take()
        ring.fit(2**21)
    assert len(gpu.log) == 3
    del ring
    assert not gpu.registered


def test_a_child_process_unlocks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, ring = FakeCuda().install(monkeypatch), new_ring()
    ring.fit(PAGE)
    ring.take()
    child = os.fork()
    if not child:
        del ring
        os._exit(len(gpu.registered))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    del ring
    assert not gpu.registered


def test_the_error_that_cuda_keeps_is_taken_by_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []

    def ones(numel: int, device: torch.device) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: operation not permitted")

    monkeypatch.setattr(torch, "ones", ones)
    page_lock._forget_error(CUDA)
    assert launched == [CUDA]
