"""What the trainer's process and its workers say to each other: tasks, replies, and claims on tasks.

Before a worker does anything else with a message from its queue, it writes that message's claim to its word in the
mapping's first page. So the trainer's process knows what a worker had that dies without a word.
"""

import pickle
import struct
from dataclasses import dataclass
from typing import Any

from lightning_hpc.data.mapping import SharedMapping
from lightning_hpc.data.packing import SlotTooSmallError

MAX_MESSAGE = 2**16
"""Bytes of a message that a socket surely takes at once; what is longer lies in the slot."""

IDLE, RETIRING, STARTING = -1, -2, -3
"""Claims that are no tasks: none taken yet; the worker was asked to end, and does; it is not ready yet."""

_ATTEMPT_BITS = 16


@dataclass(frozen=True)
class Task:
    """A batch to be made.

    Attributes:
        number: Of the batch, counted on from epoch to epoch.
        attempt: How often it has been given out before.
        generation: Counts epochs; an iterable dataset begins anew with each.
        seed: Of the epoch.
        epoch: What the dataset is told; None if it takes no epoch.
        offset: Where the slot begins in the mapping.
        capacity: Bytes of the slot.
        index: What the sampler gave: an index, or a list of them.
        skip: For an iterable dataset, the batches of the worker's part that come before this one. A new worker passes
            by those that it has not made itself.
    """

    number: int
    attempt: int
    generation: int
    seed: int
    epoch: int | None
    offset: int
    capacity: int
    index: Any
    skip: int = 0

    @property
    def claim(self) -> int:
        """Number and attempt in one word."""
        return self.number << _ATTEMPT_BITS | self.attempt


class Reply:
    """The messages from a worker: a kind, the task's number and attempt, a number, and bytes."""

    BATCH, SPILLED, NEEDS, EXHAUSTED, ERROR = b"B", b"S", b"N", b"X", b"E"
    """A packed batch; the same in the slot, where the number says; the bytes that a batch takes, while the worker waits
    for a larger slot; no batch left; an exception, pickled."""

    _HEAD = struct.Struct("<cqqq")

    def __init__(self, message: bytes) -> None:
        self.kind, self.task, self.attempt, self.number = self._HEAD.unpack_from(message)
        self.body = memoryview(message)[self._HEAD.size :]

    @classmethod
    def encode(cls, kind: bytes, task: Task, number: int = 0, body: bytes = b"") -> bytes:
        """The bytes of a message."""
        return cls._HEAD.pack(kind, task.number, task.attempt, number) + body


GRANT = b"grant"


def encode_grant(offset: int, capacity: int) -> bytes:
    """The message that answers `Reply.NEEDS` with another slot."""
    return GRANT + struct.pack("<qq", offset, capacity)


def decode_grant(message: bytes) -> tuple[int, int]:
    """Offset and capacity of that slot."""
    offset, capacity = struct.unpack("<qq", message[len(GRANT) :])
    return offset, capacity


_TASK_HEAD = struct.Struct("<?q")  # whether the task lies in its slot, and where is said here; its claim

RETIRE = _TASK_HEAD.pack(False, RETIRING)
"""The message in the common queue that lets the worker that takes it end."""


def encode_task(task: Task, mapping: SharedMapping) -> bytes:
    """The message of a task; with very many indices it only says where in the slot they lie.

    Raises:
        SlotTooSmallError: If they do not fit there.
    """
    body = pickle.dumps(task, pickle.HIGHEST_PROTOCOL)
    is_long = len(body) > MAX_MESSAGE
    if is_long:
        if len(body) > task.capacity:
            raise SlotTooSmallError(len(body))
        mapping.view[task.offset : task.offset + len(body)] = body
        body = struct.pack("<qq", task.offset, len(body))
    return _TASK_HEAD.pack(is_long, task.claim) + body


def claim_in(message: bytes) -> int:
    """The claim that goes with a message from a queue."""
    return int(_TASK_HEAD.unpack_from(message)[1])


def split_claim(claim: int) -> tuple[int, int]:
    """Number and attempt of a claimed task; the number is -1 if it is none."""
    return claim >> _ATTEMPT_BITS, claim & (1 << _ATTEMPT_BITS) - 1


def decode_task(message: bytes, mapping: SharedMapping) -> Task:
    """The task of a message."""
    body = memoryview(message)[_TASK_HEAD.size :]
    if _TASK_HEAD.unpack_from(message)[0]:
        offset, numel = struct.unpack("<qq", body)
        body = mapping.view[offset : offset + numel]
    task = pickle.loads(body)  # noqa: S301 (from the process that has started this one)
    assert isinstance(task, Task)
    return task
