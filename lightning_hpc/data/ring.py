"""Slots in one shared mapping, used again and again.

Writing into memory for the first time costs ten times as much as writing into it again, since the kernel has to find
and clear each page. So a batch is not given memory of its own, but a *slot* that earlier batches have used.

Memory: `SharedMapping`; the first page belongs to the workers' claims, slots follow. All slots have the size of the
largest batch so far, with some room.

Ownership: `SlotRing` lives in the trainer's process. A slot is free, lent to a task (a worker writes to it), or leased
to whoever holds the batch. The lease ends when the last *storage* that was made from it is gone: it hangs on the object
that exports the buffer, which every tensor, view, NumPy array and DLPack capsule over it keeps alive in the end. A
reference to the Tensor object would end too early, for `detach()`, `numpy()` and all that happens in `inference_mode`.

Page locks: where batches go to a CUDA device, each slot is page-locked from when it is made until its memory is given
back. With the last slots, that is when neither this process's ring nor anybody's lease is left.

Back-pressure: `take` makes new slots as long as fewer are held than `limit`; whoever delivers a batch while `is_scarce`
copies it out, and the slot is free at once. So workers always find one, and no batch is ever overwritten.
"""

import collections
import weakref
from dataclasses import dataclass

from lightning_hpc.data.mapping import PAGE, SharedMapping
from lightning_hpc.data.page_lock import PageLock

_HEADROOM = 1.125  # batches of variable size grow little by little


@dataclass(frozen=True)
class Slot:
    """A range of the mapping, in bytes."""

    offset: int
    capacity: int


class SlotRing:
    """The slots of one loader, in the trainer's process.

    Args:
        mapping: Where they lie, from its second page on.
        limit: Number of slots beyond which no more are made for batches that somebody holds.
        page_lock: Locks the slots, if they are to be page-locked.
    """

    def __init__(self, mapping: SharedMapping, limit: int, page_lock: PageLock | None = None) -> None:
        self._mapping, self._page_lock = mapping, page_lock
        mapping.reserve(0, PAGE)
        self._limit = limit
        self._size = 0
        self._end = PAGE
        self._free: list[Slot] = []
        self._holes: list[Slot] = []
        self._count = 0
        # Leases end in whatever thread drops the last reference; appending is atomic.
        self._returned: collections.deque[Slot] = collections.deque()

    @property
    def slot_bytes(self) -> int:
        """Capacity of the slots that are given out; 0 before the first batch's size is known."""
        return self._size

    @property
    def count(self) -> int:
        """Slots of the current size, free or not."""
        return self._count

    @property
    def is_scarce(self) -> bool:
        """Whether a batch that is leased now could leave a task without a slot."""
        self._collect()
        return not self._free and self._count >= self._limit

    def limit_to(self, limit: int) -> None:
        """Changes the limit. Slots that there are stay."""
        self._limit = limit

    def fit(self, numel: int) -> None:
        """Makes slots large enough for a batch of so many bytes, from now on."""
        if numel > self._size:
            self._size = -int(-numel * _HEADROOM // PAGE) * PAGE
            self._count = 0
            free, self._free = self._free, []
            for slot in free:
                self._retire(slot)

    def take(self) -> Slot:
        """Lends a slot to a task, which has to `give_back` or `lease` it. It has no capacity before `fit`.

        Raises:
            MemoryError: If there is no memory for a new one.
        """
        self._collect()
        if not self._size:
            return Slot(PAGE, 0)
        if self._free:
            return self._free.pop()
        slot = self._make()
        self._count += 1
        return slot

    def give_back(self, slot: Slot) -> None:
        """Ends a loan."""
        self._returned.append(slot)

    def lease(self, slot: Slot) -> memoryview:
        """Turns a loan into a lease of whoever keeps the returned view alive, directly or through a storage."""
        view = self._mapping.view[slot.offset : slot.offset + slot.capacity]
        weakref.finalize(view, _end_lease, self._returned, slot, self._page_lock).atexit = False
        return view

    def _collect(self) -> None:
        while self._returned:
            slot = self._returned.popleft()
            if slot.capacity == self._size:
                self._free.append(slot)
            elif slot.capacity:
                self._retire(slot)

    def _retire(self, slot: Slot) -> None:
        if self._page_lock is not None:
            self._page_lock.unlock(slot.offset)  # first: the device would go on with pages that are nobody's any more
        self._mapping.release(slot.offset, slot.capacity)
        self._holes = _merge([*self._holes, slot])
        if self._holes[-1].offset + self._holes[-1].capacity == self._end:
            self._end = self._holes.pop().offset

    def _make(self) -> Slot:
        for index, hole in enumerate(self._holes):
            if hole.capacity >= self._size:
                offset, rest = hole.offset, Slot(hole.offset + self._size, hole.capacity - self._size)
                self._holes[index : index + 1] = [rest] if rest.capacity else []
                break
        else:
            offset, self._end = self._end, self._end + self._size
            if self._end > self._mapping.size:
                raise MemoryError(f"batches of {self._size / 2**20:.0f} MiB do not fit into {self._mapping.size} bytes")
        self._mapping.reserve(offset, self._size)
        if self._page_lock is not None:
            self._page_lock.lock(offset, self._size)
        return Slot(offset, self._size)


def _end_lease(returned: collections.deque[Slot], slot: Slot, page_lock: PageLock | None) -> None:
    """Gives a slot back. The page lock is an argument so that it lasts until then."""
    returned.append(slot)


def _merge(holes: list[Slot]) -> list[Slot]:
    """The same memory in as few holes as can be, in order: slots that grow shall find room where smaller ones were."""
    merged: list[Slot] = []
    for hole in sorted(holes, key=lambda hole: hole.offset):
        if merged and merged[-1].offset + merged[-1].capacity == hole.offset:
            last = merged.pop()
            hole = Slot(last.offset, last.capacity + hole.capacity)
        merged.append(hole)
    return merged
