"""The batches of a loader, in order, from a pool of workers that lasts over epochs."""

import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightning_hpc.data.local_reader import EpochPlan
from lightning_hpc.data.packing import SlotTooSmallError, unpack
from lightning_hpc.data.ring import Slot, SlotRing
from lightning_hpc.data.worker import Reply, Task, WorkerSettings, raise_error
from lightning_hpc.data.worker_pool import WorkerPool

_HELD = 4
"""Slots for what has left the stream: at the model, on its way there, looked at ahead by the loop, and one to spare."""

_CLAIM_S = 0.2  # a worker says what it has taken within microseconds, unless it was stopped just then
_MAX_DEATHS_WITHOUT_REPLY = 3
_DEADLY = 2  # deaths over the same samples


@dataclass
class _Sent:
    task: Task
    slot: Slot
    worker: int | None  # the one that has to do it, if not just anyone

    def use(self, slot: Slot) -> None:
        self.slot = slot
        self.task = replace(self.task, offset=slot.offset, capacity=slot.capacity)

    def repeat(self) -> None:
        self.task = replace(self.task, attempt=self.task.attempt + 1)


class BatchStream:
    """Keeps workers busy some batches ahead, and hands their batches out.

    Args:
        settings: What the workers need.
        context: How processes are started.
        prefetch_factor: Batches that each worker makes ahead.
        timeout_s: How long to wait for a batch; None is for ever.
        in_order: Whether batches come in the order of the sampler, or as they get ready.
    """

    def __init__(
        self, settings: WorkerSettings, context: Any, *, prefetch_factor: int, timeout_s: float | None, in_order: bool
    ) -> None:
        self._settings = settings
        self._ahead = prefetch_factor * settings.num_workers
        self._timeout_s, self._in_order = timeout_s, in_order
        self._ring = SlotRing(settings.mapping, limit=2 * (self._ahead + _HELD))
        self._pool = WorkerPool(settings, context)
        self._sent: dict[int, _Sent] = {}
        self._ready: dict[int, tuple[Reply, Slot]] = {}
        self._abandoned: dict[tuple[int, int], _Sent] = {}  # a worker may still write to these, by number and attempt
        self._unsent: list[int] = []  # their queue was full
        self._numbered = 0
        self._handed_out = 0
        self._generation = self._started = -1  # epochs that were begun, and those whose batches are being made
        self._guess: EpochPlan | None = None
        self._end: int | None = None  # the first batch that belongs to it
        self._deaths: Counter[int] = Counter()
        self._deaths_without_reply = 0
        self._last_worker = -1
        self._plan: EpochPlan | None = None

    @property
    def pids(self) -> list[int | None]:
        """The workers' process ids."""
        return self._pool.pids

    def begin(self, plan: EpochPlan) -> Callable[[], Any]:
        """Begins an epoch; what is left of the one before is given up.

        Args:
            plan: The epoch. If it is the one that the plan before has guessed, its first batches are ready, or nearly.

        Returns:
            What gives the next batch of this epoch. It raises StopIteration if the epoch is over, what a worker has
            raised, and RuntimeError if a batch takes longer than the time-out, if its samples end every worker that
            reads them, or if another epoch has begun.
        """
        self._give_up(self._end if plan is self._guess else None)
        if plan is not self._guess:
            self._start(plan)
        self._generation += 1
        self._guess = self._end = None
        self._fill()
        return partial(self._next_batch, self._generation)

    def close(self) -> None:
        """Ends the workers. Batches that somebody holds stay as they are."""
        self._pool.close()

    def _next_batch(self, generation: int) -> Any:
        if generation != self._generation:
            raise RuntimeError(
                "this iterator has ended, since a new one of the same loader was begun; for several at once, make the"
                " loader with persistent_workers=False"
            )
        while True:
            self._fill()
            if not self._is_any_left():
                raise StopIteration
            number = self._await_one()
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
        while (
            self._plan is not None
            and len(self._sent) + len(self._ready) - self._handed_out < self._ahead
            and not self._unsent
        ):
            worker = self._choose_worker()
            index = next(self._plan.indices, self) if worker != -1 else self
            if index is not self:
                self._send(index, worker)
            elif not self._look_ahead(self._plan):
                return

    def _start(self, plan: EpochPlan) -> None:
        self._plan = plan
        self._started += 1
        self._first = self._numbered
        self._over: set[int] = set()  # workers whose part of an iterable dataset is over
        self._asked: Counter[int] = Counter()  # batches of each part, in this epoch

    def _look_ahead(self, plan: EpochPlan) -> bool:
        """Goes on with the epoch that will probably follow; returns whether there is one."""
        if self._guess is not None:
            return False  # one epoch ahead is enough, and its end would move ours
        self._plan = None
        self._guess = plan.guess_next() if plan.guess_next is not None else None
        if self._guess is None:
            return False
        self._end = self._numbered
        self._start(self._guess)
        return True

    def _is_any_left(self) -> bool:
        """Whether a batch of the present epoch is still to come."""
        first = min((*self._sent, *self._ready), default=None)
        return first is not None and (self._end is None or first < self._end)

    def _choose_worker(self) -> int | None:
        """None: whoever is free. Else in turn, among those whose part is not over; -1 if there is none."""
        if not self._settings.source.is_iterable:
            return None
        count = self._settings.num_workers
        last = self._last_worker if self._numbered > self._first else -1
        for step in range(1, count + 1):
            if (last + step) % count not in self._over:
                self._last_worker = (last + step) % count
                return self._last_worker
        return -1

    def _send(self, index: Any, worker: int | None) -> None:
        assert self._plan is not None
        slot = self._ring.take()
        task = Task(
            number=self._numbered,
            attempt=0,
            generation=self._started,
            seed=self._plan.seed,
            epoch=self._plan.dataset_epoch,
            offset=slot.offset,
            capacity=slot.capacity,
            index=index,
            skip=0 if worker is None else self._asked[worker],
        )
        self._numbered += 1
        if worker is not None:
            self._asked[worker] += 1
        self._sent[task.number] = _Sent(task, slot, worker)
        if not self._dispatch(self._sent[task.number]):
            self._unsent.append(task.number)

    def _dispatch(self, sent: _Sent) -> bool:
        try:
            return self._pool.send(sent.task, sent.worker)
        except SlotTooSmallError as error:
            # Very many indices: they travel in the slot.
            self._move(sent, error.needed)
            return self._pool.send(sent.task, sent.worker)

    def _move(self, sent: _Sent, numel: int) -> None:
        """Gives a task a slot of another size instead of its own."""
        self._ring.fit(numel)
        self._ring.give_back(sent.slot)
        sent.use(self._ring.take())

    def _await_one(self) -> int:
        started = time.monotonic()
        while (number := self._first_ready()) is None:
            left = None if self._timeout_s is None else self._timeout_s - (time.monotonic() - started)
            if left is not None and left <= 0:
                raise RuntimeError(f"DataLoader timed out after {self._timeout_s} seconds")
            for worker, reply in self._pool.receive(left):
                if reply is None:
                    self._replace(worker)
                else:
                    self._take(worker, reply)
            self._fill()
        return number

    def _first_ready(self) -> int | None:
        if self._in_order:
            first = min((*self._sent, *self._ready), default=None)
            return first if first in self._ready else None
        first = min(self._ready, default=None)
        return None if first is not None and self._end is not None and first >= self._end else first

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
                self._over.add(worker)
        else:
            self._ring.give_back(self._abandoned.pop(key).slot)

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
                self._abandoned[number, sent.task.attempt] = sent
        for number in [number for number in self._ready if end is None or number < end]:
            self._ring.give_back(self._ready.pop(number)[1])
        self._unsent = sorted(waiting & self._sent.keys())

    def _replace(self, worker: int) -> None:
        """Puts a new worker in the place of a dead one, and gives out again what that had to do."""
        claim, code, pid = self._pool.claim_of(worker), self._pool.exit_code(worker), self._pool.pids[worker]
        self._deaths_without_reply += 1
        if self._settings.source.is_iterable:
            lost = [number for number, sent in self._sent.items() if sent.worker == worker]
        else:
            lost = self._lost_in_queue(worker)
        for key, sent in list(self._abandoned.items()):
            if worker == sent.worker or (sent.worker is None and key == claim):
                self._ring.give_back(self._abandoned.pop(key).slot)
        self._pool.restart(worker)
        had = [number for number in lost if (number, self._sent[number].task.attempt) == claim]
        for number in lost:
            self._sent[number].repeat()
        self._unsent = sorted({*self._unsent, *lost})
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
            self._over.add(worker)
            read = f"batch {task.skip} of its part of the dataset"
            given_up = [other for other, sent in self._sent.items() if sent.worker == worker]
        for other in given_up:
            self._ring.give_back(self._sent.pop(other).slot)
            self._unsent.remove(other)
        raise RuntimeError(f"{what}, as another one did before, while it read {read}; look at the samples there")

    def _require_life(self, what: str) -> None:
        """Raises where workers do not live long enough to read anything."""
        if self._deaths_without_reply > max(_MAX_DEATHS_WITHOUT_REPLY, self._settings.num_workers):
            self._deaths_without_reply = 0
            raise RuntimeError(
                f"{what}, as those before it; -9 is what the kernel does to a process that takes too much memory"
            )

    def _lost_in_queue(self, worker: int) -> list[int]:
        """What nobody has taken, and what the dead worker had. The latter may be in question for a moment."""
        queued, claim = set(self._pool.take_back()), self._pool.claim_of(worker)
        living = [other for other in range(self._settings.num_workers) if other != worker]
        until = time.monotonic() + _CLAIM_S
        while True:
            for other, reply in self._pool.receive(0):
                if reply is not None:  # further deaths are reported again
                    self._take(other, reply)
            claims = {self._pool.claim_of(other) for other in living}
            taken = [
                (number, sent.task.attempt)
                for number, sent in self._sent.items()
                if number not in queued and number not in self._unsent
            ]
            lost = [key for key in taken if key not in claims]
            if set(lost) <= {claim} or time.monotonic() > until:
                break
        for key in lost:
            if key != claim:
                # Somebody may have it all the same, and write to its slot.
                sent = self._sent[key[0]]
                self._abandoned[key] = replace(sent)
                sent.use(self._ring.take())
        return [*queued, *(number for number, _ in lost)]
