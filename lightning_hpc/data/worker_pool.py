"""The worker processes of one loader, and the sockets between."""

import contextlib
import itertools
import os
import pickle
import select
import socket
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

from lightning_hpc.data.messages import (
    MAX_MESSAGE,
    RETIRE,
    RETIRING,
    STARTING,
    Reply,
    Task,
    claim_in,
    encode_grant,
    encode_task,
    split_claim,
)
from lightning_hpc.data.worker import WorkerSettings, run_worker

_JOIN_S = 2.0  # for all of them; a sample may take longer


class WorkerPool:
    """Starts workers, gives them tasks and takes their replies.

    Tasks for a map-style dataset are in one queue, from which a free worker takes the next one, so that a slow sample
    holds up nobody but itself (pytorch#135409). The queue is a socket that keeps messages apart (SOCK_SEQPACKET): the
    kernel gives each message to one reader, and no lock is held that could die with its holder. With an iterable
    dataset each worker has a part of the data, and a queue of its own.

    The number of those with a common queue can be changed at any time. A message in the queue asks whoever takes it to
    end, so that it is one that has nothing to do. For a moment there may be a few more or fewer than wanted, while
    workers start and end or where one dies in between; `receive` sees to it that the number comes right.

    Args:
        settings: What the workers need.
        context: How processes are started.
    """

    def __init__(self, settings: WorkerSettings, context: BaseContext) -> None:
        self._settings, self._context = settings, context
        self._shared = None if settings.source.is_iterable else _socket_pair()
        self._poll = select.epoll()
        self._controls: dict[int, socket.socket] = {}
        self._processes: dict[int, BaseProcess] = {}
        self._lives: dict[int, int] = {}
        self._count_lives = itertools.count()
        self._by_descriptor: dict[int, int] = {}
        self._wanted = settings.num_workers
        self._retiring = 0  # who was asked to end, and has not yet
        self._claims = settings.mapping.claims
        self._owned = os.getpid(), self._processes, self._controls, self._shared, self._poll
        self._finalizer = weakref.finalize(self, _end, *self._owned)
        self._adjust()

    @property
    def pids(self) -> dict[int, int | None]:
        """The processes' ids, by worker."""
        return {worker: process.pid for worker, process in self._processes.items()}

    @property
    def lives(self) -> dict[int, int]:
        """What tells a worker from others that had its number before it, by worker."""
        return self._lives

    @property
    def is_settled(self) -> bool:
        """Whether there are as many workers as wanted, and all of them are ready for tasks."""
        has_count = len(self._processes) == self._wanted and not self._retiring
        return has_count and not any(self._claims[worker] == STARTING for worker in self._processes)

    @property
    def has_lost_retirement(self) -> bool:
        """Whether somebody has taken the message that lets it end, and does not say so; ask after `take_back`."""
        return self._retiring > sum(self._claims[worker] == RETIRING for worker in self._processes)

    def resize(self, num_workers: int) -> None:
        """Changes the number of workers, not with an iterable dataset. Returns before those that are to end have."""
        assert self._shared is not None
        assert num_workers > 0
        self._wanted = num_workers
        try:
            self._adjust()
        except Exception:
            self._wanted = max(len(self._processes) - self._retiring, 1)
            raise

    def send(self, task: Task, worker: int | None = None) -> bool:
        """Gives a task to a worker, or to whoever is free. Returns False if the queue is full.

        Raises:
            SlotTooSmallError: If it has so many indices that they have to lie in the slot, and do not fit.
        """
        message = encode_task(task, self._settings.mapping)
        sock = self._shared[0] if self._shared is not None else self._controls[worker or 0]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its death will be reported
            try:
                sock.send(message, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
        return True

    def grant(self, worker: int, offset: int, capacity: int) -> None:
        """Answers a worker that needs another slot."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._controls[worker].send(encode_grant(offset, capacity))

    def receive(self, timeout_s: float | None) -> list[tuple[int, Reply | None]]:
        """Waits for replies, which come with the worker's number; None instead of one says that the worker is dead.

        Nothing is said of the end of a worker that was asked to, however it came.
        """
        self._adjust()
        descriptors = [descriptor for descriptor, _ in self._poll.poll(timeout_s)]
        workers = {self._by_descriptor[descriptor] for descriptor in descriptors}
        received: list[tuple[int, Reply | None]] = [pair for worker in workers for pair in self._read(worker)]
        heard = {worker for worker, _ in received}
        for worker in workers:
            if self._processes[worker].sentinel not in descriptors:
                continue
            if self._claims[worker] != RETIRING:
                received.append((worker, None))
            elif worker not in heard:  # else the next time: it lives until its replies have been heeded
                self._forget(worker)
                self._retiring = max(self._retiring - 1, 0)
        return received

    def claim_of(self, worker: int) -> tuple[int, int]:
        """Number and attempt of the task that a worker took last; the number is -1 if none."""
        return split_claim(self._claims[worker])

    def exit_code(self, worker: int) -> int | None:
        """How a dead worker has ended; a signal is negative."""
        self._processes[worker].join()
        return self._processes[worker].exitcode

    def take_back(self) -> list[int]:
        """Empties the common queue; returns the numbers of the tasks, which nobody had taken.

        Messages that let workers end are sent again by `receive`.
        """
        assert self._shared is not None
        numbers = []
        with contextlib.suppress(BlockingIOError):
            while message := self._shared[1].recv(2 * MAX_MESSAGE, socket.MSG_DONTWAIT):
                if message == RETIRE:
                    self._retiring = max(self._retiring - 1, 0)
                else:
                    numbers.append(split_claim(claim_in(message))[0])
        return numbers

    def replace(self, worker: int) -> bool:
        """Puts a new process in the place of a dead one, after `take_back`.

        Returns False if it has done so for nobody: the dead one must have been about to end as it was asked to, since
        nobody else is.
        """
        was_retiring = self.has_lost_retirement
        self._forget(worker)
        if was_retiring:
            self._retiring -= 1
        else:
            self._start(worker)
        return not was_retiring

    def close(self, join_s: float | None = None) -> None:
        """Ends all workers.

        Args:
            join_s: How long they may go on with the sample that they are at; None is a while.
        """
        if self._finalizer.detach():
            _end(*self._owned, join_s)

    def _adjust(self) -> None:
        while self._wanted > len(self._processes) - self._retiring:
            self._start(next(number for number in itertools.count() if number not in self._processes))
        while self._wanted < len(self._processes) - self._retiring and self._ask_to_retire():
            self._retiring += 1

    def _ask_to_retire(self) -> bool:
        assert self._shared is not None
        with contextlib.suppress(BlockingIOError):
            self._shared[0].send(RETIRE, socket.MSG_DONTWAIT)
            return True
        return False  # the queue is full

    def _start(self, number: int) -> None:
        ours, theirs = _socket_pair()
        self._claims[number] = STARTING
        count = max(self._wanted, number + 1)  # what the user's code is told
        tasks = theirs if self._shared is None else self._shared[1]
        inherited: tuple[socket.socket, ...] = ()
        if self._context.get_start_method() == "fork":
            inherited = (ours, *self._controls.values(), *([] if self._shared is None else self._shared[:1]))
        settings = replace(self._settings, num_workers=count)
        process = self._context.Process(  # type: ignore[attr-defined]
            target=run_worker, args=(settings, number, tasks, theirs, inherited), daemon=True
        )
        try:
            process.start()
        except OSError:
            ours.close()
            theirs.close()
            raise
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            ours.close()
            theirs.close()
            if not self._processes:
                self.close()
            raise type(error)(
                f"{error}; workers that are started by {self._context.get_start_method()!r} get dataset, collate_fn and"
                " worker_init_fn pickled: define them in a module, or pass multiprocessing_context='fork'"
            ) from error
        theirs.close()
        self._controls[number], self._processes[number] = ours, process
        self._lives[number] = next(self._count_lives)
        for descriptor in (ours.fileno(), process.sentinel):
            self._by_descriptor[descriptor] = number
            self._poll.register(descriptor, select.EPOLLIN)

    def _read(self, worker: int) -> Iterator[tuple[int, Reply]]:
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while message := self._controls[worker].recv(2 * MAX_MESSAGE, socket.MSG_DONTWAIT):
                yield worker, Reply(message)

    def _forget(self, worker: int) -> None:
        control, process = self._controls.pop(worker), self._processes.pop(worker)
        for descriptor in (control.fileno(), process.sentinel):
            self._by_descriptor.pop(descriptor, None)
            with contextlib.suppress(OSError):
                self._poll.unregister(descriptor)
        control.close()
        process.join()
        del self._lives[worker]


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * MAX_MESSAGE)
    return pair


def _end(
    owner: int,
    processes: dict[int, BaseProcess],
    controls: dict[int, socket.socket],
    shared: tuple[socket.socket, socket.socket] | None,
    poll: select.epoll,
    join_s: float | None = None,
) -> None:
    if os.getpid() != owner:
        return  # a fork has copied the pool; the workers are not its own
    for sock in (*controls.values(), *(shared or ())):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # also where other processes have inherited a copy
        sock.close()
    poll.close()
    until = time.monotonic() + (_JOIN_S if join_s is None else join_s)
    for process in processes.values():
        process.join(max(until - time.monotonic(), 0))
        if process.is_alive():
            process.kill()
            process.join()
