"""What the trainer's process remembers of the tasks that it has sent to its workers."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from lightning_hpc.data.messages import Task
from lightning_hpc.data.ring import Slot

Key = tuple[int, int]
"""Number and attempt of a task."""


@dataclass
class SentTask:
    """A task, where its batch will lie, and who makes it.

    Attributes:
        task: The task.
        slot: Lent to it.
        worker: The one that has to do it, if not just anyone.
        order: Counts all that was sent; set whenever the task is.
    """

    task: Task
    slot: Slot
    worker: int | None
    order: int = -1

    @property
    def key(self) -> Key:
        """Number and attempt."""
        return self.task.number, self.task.attempt

    def use(self, slot: Slot) -> None:
        """Gives it another slot."""
        self.slot = slot
        self.task = replace(self.task, offset=slot.offset, capacity=slot.capacity)

    def repeat(self) -> None:
        """Makes it one that is to be sent once more."""
        self.task = replace(self.task, attempt=self.task.attempt + 1)


@dataclass
class _Abandoned:
    sent: SentTask
    last_order: int
    suspects: set[int]


class AbandonedTasks:
    """Tasks whose batches nobody wants any more, and that a worker may have taken all the same, and write to the slot.

    The slot is free when the worker that has the task has replied to it, or has ended. It may be unknown who has it, or
    whether anybody does, if a worker was killed just when it took a task. A worker does one task after the other: the
    slot is free, too, when each that lived when the task was abandoned has ended, or has replied to a task that was
    sent later.
    """

    def __init__(self) -> None:
        self._tasks: dict[Key, _Abandoned] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, key: Key) -> SentTask:
        return self._tasks[key].sent

    def add(self, sent: SentTask, last_order: int, suspects: Collection[int]) -> None:
        """Adds a task that is in no queue any more.

        Args:
            sent: The task. Its slot must not be used for anything else until it is returned by another method.
            last_order: Of all tasks that were sent until now.
            suspects: The lives of all workers that may have it.
        """
        self._tasks[sent.key] = _Abandoned(sent, last_order, set(suspects))

    def pop(self, key: Key) -> Slot:
        """Takes out a task that a worker has replied to; returns its slot."""
        return self._tasks.pop(key).sent.slot

    def on_reply(self, life: int | None, order: int, lives: Collection[int]) -> list[Slot]:
        """Heeds what a worker has replied to.

        Args:
            life: The worker's; None if it has ended since.
            order: Of the task that it has replied to.
            lives: Of all workers now.

        Returns:
            The slots that are free by that.
        """
        for abandoned in self._tasks.values():
            if life is not None and order > abandoned.last_order:
                abandoned.suspects.discard(life)
            abandoned.suspects.intersection_update(lives)
        return self._take_free()

    def on_death(self, worker: int, life: int, claim: Key) -> list[Slot]:
        """Heeds the end of a worker; returns the slots that are free by that.

        Args:
            worker: Its number.
            life: Its life.
            claim: The task that it took last.
        """
        for key, abandoned in self._tasks.items():
            abandoned.suspects.discard(life)
            if worker == abandoned.sent.worker or key == claim:
                abandoned.suspects.clear()
        return self._take_free()

    def _take_free(self) -> list[Slot]:
        free = [key for key, abandoned in self._tasks.items() if not abandoned.suspects]
        return [self.pop(key) for key in free]
