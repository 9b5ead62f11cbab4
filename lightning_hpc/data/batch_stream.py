"""The batches of a loader, in order, from a pool of workers that lasts over epochs."""

import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_hpc.data.agenda import Agenda
from lightning_hpc.data.local_reader import EpochPlan
from lightning_hpc.data.messages import Reply
from lightning_hpc.data.packing import SlotTooSmallError, unpack
from lightning_hpc.data.page_lock import PageLock
from lightning_hpc.data.ring import Slot, SlotRing
from lightning_hpc.data.sent_tasks import AbandonedTasks, SentTask
from lightning_hpc.data.worker import WorkerSettings
from lightning_hpc.data.worker_errors import raise_error
from lightning_hpc.data.worker_pool import WorkerPool

_HELD = 4
"""Slots for what has left the stream: at the model, on its way there, looked at ahead by the loop, and one to spare."""

_CLAIM_S = 0.2  # a worker says what it has taken within microseconds, unless it was stopped just then
_MAX_DEATHS_WITHOUT_REPLY = 3
_DEADLY = 2  # deaths over the same samples


class BatchStream:
    """Keeps workers busy some batches ahead, and hands their batches out.

    Args:
        settings: What the workers need.
        context: How processes are started.
        prefetch_factor: Batches that each worker makes ahead.
        timeout_s: How long to wait for a batch; None is for ever.
        in_order: Whether batches come in the order of the sampler, or as they get ready.
        page_lock: Locks the slots, if they are to be page-locked.

    Attributes:
        waited_s: Seconds for which nothing could be done but wait for the last batch.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        context: Any,
        *,
        prefetch_factor: int,
        timeout_s: float | None,
        in_order: bool,
        page_lock: PageLock | None = None,
    ) -> None:
        self._settings = settings
        self._timeout_s, self._in_order, self._prefetch_factor = timeout_s, in_order, prefetch_factor
        self._ahead = prefetch_factor * settings.num_workers
        self._ring = SlotRing(settings.mapping, _slots(self._ahead), page_lock)
        self._pool = WorkerPool(settings, context)
        self._sent: dict[int, SentTask] = {}
        self._ready: dict[int, tuple[Reply, Slot]] = {}
        self._agenda = Agenda(settings.num_workers if settings.source.is_iterable else None)
        self._abandoned = AbandonedTasks()
        self._order = 0  # of what was sent last
        self._unsent: list[int] = []  # their queue was full
        self._handed_out = 0
        self._generation = 0  # counts epochs
        self._deaths: Counter[int] = Counter()
        self._deaths_without_reply = 0
        self._is_closed = False
        self.waited_s = 0.0

    @property
    def pids(self) -> list[int | None]:
        """The workers' process ids."""
        return [*self._pool.pids.values()]

    @property
    def is_settled(self) -> bool:
        """Whether there are as many workers as wanted, and all of them are ready."""
        return self._pool.is_settled

    def resize(self, num_workers: int) -> None:
        """Changes the number of workers, between two batches; the batches stay the same.

        Returns before those that are to end have. The slots that there are stay.

        Raises:
            ValueError: With an iterable dataset, since each worker has a part of it.
        """
        if self._settings.source.is_iterable:
            raise ValueError(f"num_workers={num_workers}: the workers of an iterable dataset have a part of it each")
        self._ahead = self._prefetch_factor * num_workers
        self._ring.limit_to(_slots(self._ahead))
        self._pool.resize(num_workers)

    def begin(self, plan: EpochPlan) -> Callable[[], Any]:
        """Begins an epoch; what is left of the one before is given up.

        Args:
            plan: The epoch. If it is the one that the plan before has guessed, its first batches are ready, or nearly.

        Returns:
            What gives the next batch of this epoch. It raises StopIteration if the epoch is over, what a worker has
            raised, and RuntimeError if a batch takes longer than the time-out, if its samples end every worker that
            reads them, if another epoch has begun, or after `close`.
        """
        self._give_up(self._agenda.begin(plan))
        self._generation += 1
        self._fill()
        return partial(self._next_batch, self._generation)

    def wait(self, timeout_s: float) -> bool:
        """Waits for the next batch, or the end of the epoch; returns whether it is there."""
        self._fill()
        return not self._is_any_left() or self._await_one(timeout_s) is not None

    def close(self, join_s: float | None = None) -> None:
        """Ends the workers, and those at a sample after some seconds. Batches that somebody holds stay as they are."""
        self._is_closed = True
        self._pool.close(join_s)

    def _next_batch(self, generation: int) -> Any:
        if self._is_closed:
            raise RuntimeError("this iterator has ended, since its loader was closed; begin a new one")
        if generation != self._generation:
            raise RuntimeError(
                "this iterator has ended, since a new one of the same loader was begun; for several at once, make the"
                " loader with persistent_workers=False"
            )
        while True:
            self._fill()
            if not self._is_any_left():
                raise StopIteration
            number = self._await_one(self._timeout_s)
            if number is None:
                raise RuntimeError(f"DataLoader timed out after {self._timeout_s} seconds")
            self._handed_out = 1
            self._fill()  # the workers go on while the batch is unpacked and used
            self._handed_out = 0
            reply, slot = self._ready.pop(number)
            if reply.kind != Reply.EXHAUSTED:
                return self._open(reply, slot)
            self._ring.give_back(slot)

    def _fill(self) -> None:
        while self._unsent and self._dispatch(self._sent[self._unsent[0]]):
            self._unsent.pop(0)
        while len(self._sent) + len(self._ready) - self._handed_out < self._ahead and not self._unsent:
            sent = self._agenda.next(self._ring.take)
            if sent is None:
                return
            self._sent[sent.task.number] = sent
            if not self._dispatch(sent):
                self._unsent.append(sent.task.number)

    def _is_any_left(self) -> bool:
        """Whether a batch of the present epoch is still to come."""
        first = min((*self._sent, *self._ready), default=None)
        return first is not None and (self._agenda.end is None or first < self._agenda.end)

    def _dispatch(self, sent: SentTask) -> bool:
        self._order += 1
        sent.order = self._order
        try:
            return self._pool.send(sent.task, sent.worker)
        except SlotTooSmallError as error:
            # Very many indices: they travel in the slot.
            self._move(sent, error.needed)
            return self._pool.send(sent.task, sent.worker)

    def _move(self, sent: SentTask, numel: int) -> None:
        """Gives a task a slot of another size instead of its own."""
        self._ring.fit(numel)
        self._ring.give_back(sent.slot)
        sent.use(self._ring.take())

    def _await_one(self, timeout_s: float | None) -> int | None:
        """Number of the next batch, when it is there; None if that takes too long."""
        self.waited_s = 0.0
        if (number := self._first_ready()) is not None:
            return number
        started = time.monotonic()
        while (number := self._first_ready()) is None:
            left = None if timeout_s is None else timeout_s - (time.monotonic() - started)
            if left is not None and left <= 0:
                return None
            for worker, reply in self._pool.receive(left):
                if reply is None:
                    self._replace(worker)
                else:
                    self._take(worker, reply)
            self._fill()
        self.waited_s = time.monotonic() - started
        return number

    def _first_ready(self) -> int | None:
        if self._in_order:
            first = min((*self._sent, *self._ready), default=None)
            return first if first in self._ready else None
        first = min(self._ready, default=None)
        return None if first is not None and self._agenda.end is not None and first >= self._agenda.end else first

    def _take(self, worker: int, reply: Reply) -> None:
        self._deaths_without_reply = 0
        key = (reply.task, reply.attempt)
        current = self._sent.get(reply.task)
        is_current = current is not None and current.task.attempt == reply.attempt
        sent = current if current is not None and is_current else self._abandoned[key]
        if reply.kind == Reply.NEEDS:
            self._move(sent, reply.number)
            self._pool.grant(worker, sent.slot.offset, sent.slot.capacity)
        elif is_current:
            self._ready[reply.task] = (reply, self._sent.pop(reply.task).slot)
            if reply.kind == Reply.EXHAUSTED:
                self._agenda.pass_by(worker)
        else:
            self._ring.give_back(self._abandoned.pop(key))
        if self._abandoned:
            self._give_back(
                self._abandoned.on_reply(self._pool.lives.get(worker), sent.order, self._pool.lives.values())
            )

    def _give_back(self, slots: list[Slot]) -> None:
        for slot in slots:
            self._ring.give_back(slot)

    def _open(self, reply: Reply, slot: Slot) -> Any:
        if reply.kind == Reply.ERROR:
            self._ring.give_back(slot)
            raise_error(reply.body)
        copied = self._ring.is_scarce
        view = self._ring.lease(slot)
        packed = reply.body
        if reply.kind == Reply.SPILLED:
            packed = view[reply.number : reply.number + int(bytes(packed))]
        return unpack(packed, view, copied)

    def _give_up(self, end: int | None) -> None:
        """Forgets what was sent before a number, or all of it; workers may be at it still."""
        queued = set() if self._settings.source.is_iterable else set(self._pool.take_back())
        waiting = queued | set(self._unsent)
        for number in [number for number in self._sent if end is None or number < end]:
            sent = self._sent.pop(number)
            if number in waiting:
                self._ring.give_back(sent.slot)
            else:
                self._abandon(sent)
        for number in [number for number in self._ready if end is None or number < end]:
            self._ring.give_back(self._ready.pop(number)[1])
        self._unsent = sorted(waiting & self._sent.keys())

    def _replace(self, worker: int) -> None:
        """Puts a new worker in the place of a dead one, and gives out again what that had to do."""
        claim, code, pid = self._pool.claim_of(worker), self._pool.exit_code(worker), self._pool.pids[worker]
        if self._settings.source.is_iterable:
            lost = [number for number, sent in self._sent.items() if sent.worker == worker]
        else:
            lost = self._lost_in_queue(worker)
        self._give_back(self._abandoned.on_death(worker, self._pool.lives[worker], claim))
        is_replaced = self._pool.replace(worker)
        had = [number for number in lost if self._sent[number].key == claim]
        for number in lost:
            self._sent[number].repeat()
        self._unsent = sorted({*self._unsent, *lost})
        if not is_replaced:
            return
        self._deaths_without_reply += 1
        self._deaths.update(had)
        what = f"DataLoader worker (pid {pid}) exited unexpectedly with code {code}"
        for number in had:
            self._require_harmless(number, worker, what)
        self._require_life(what)
        self._fill()
        warnings.warn(
            f"worker {worker} of the loader of a {type(self._settings.source.dataset).__name__} has ended with code"
            f" {code} and was replaced; no sample is lost",
            RuntimeWarning,
            stacklevel=2,
        )

    def _require_harmless(self, number: int, worker: int, what: str) -> None:
        """Raises where the samples of a task have ended each worker that read them."""
        if self._deaths[number] < _DEADLY:
            return
        task = self._sent[number].task
        given_up, read = [number], f"the samples {task.index}"
        if self._settings.source.is_iterable:  # nobody gets past it
            self._agenda.pass_by(worker)
            read = f"batch {task.skip} of its part of the dataset"
            given_up = [other for other, sent in self._sent.items() if sent.worker == worker]
        for other in given_up:
            self._ring.give_back(self._sent.pop(other).slot)
            self._unsent.remove(other)
        raise RuntimeError(f"{what}, as another one did before, while it read {read}; look at the samples there")

    def _require_life(self, what: str) -> None:
        """Raises where workers do not live long enough to read anything."""
        if self._deaths_without_reply > max(_MAX_DEATHS_WITHOUT_REPLY, len(self._pool.pids)):
            self._deaths_without_reply = 0
            raise RuntimeError(
                f"{what}, as those before it; -9 is what the kernel does to a process that takes too much memory"
            )

    def _lost_in_queue(self, worker: int) -> list[int]:
        """What nobody has taken, and what the dead worker had. The latter may be in question for a moment."""
        queued, claim = set(self._pool.take_back()), self._pool.claim_of(worker)
        living = [other for other in self._pool.lives if other != worker]
        until = time.monotonic() + _CLAIM_S
        while True:
            for other, reply in self._pool.receive(0):
                if reply is not None:  # further deaths are reported again
                    self._take(other, reply)
            claims = {self._pool.claim_of(other) for other in living}
            taken = [
                sent.key for number, sent in self._sent.items() if number not in queued and number not in self._unsent
            ]
            lost = [key for key in taken if key not in claims]
            is_clear = set(lost) <= {claim} and not self._pool.has_lost_retirement
            if is_clear or time.monotonic() > until:
                break
        for key in lost:
            if key != claim:
                # Somebody may have it all the same, and write to its slot.
                sent = self._sent[key[0]]
                self._abandon(replace(sent))
                sent.use(self._ring.take())
        return [*queued, *(number for number, _ in lost)]

    def _abandon(self, sent: SentTask) -> None:
        lives = self._pool.lives
        self._abandoned.add(sent, self._order, lives.values() if sent.worker is None else [lives[sent.worker]])


def _slots(ahead: int) -> int:
    return 2 * (ahead + _HELD)
