"""The worker processes of one loader, and the sockets between."""

import contextlib
import os
import pickle
import select
import socket
import time
import weakref
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

from lightning_hpc.data.worker import (
    MAX_MESSAGE,
    Reply,
    Task,
    WorkerSettings,
    claim_in,
    encode_grant,
    encode_task,
    run_worker,
    split_claim,
)

_JOIN_S = 2.0  # for all of them; a sample may take longer


class WorkerPool:
    """Starts workers, gives them tasks and takes their replies.

    Tasks for a map-style dataset are in one queue, from which a free worker takes the next one, so that a slow sample
    holds up nobody but itself (pytorch#135409). The queue is a socket that keeps messages apart (SOCK_SEQPACKET): the
    kernel gives each message to one reader, and no lock is held that could die with its holder. With an iterable
    dataset each worker has a part of the data, and a queue of its own.

    Args:
        settings: What the workers need.
        context: How processes are started.
    """

    def __init__(self, settings: WorkerSettings, context: BaseContext) -> None:
        self._settings, self._context = settings, context
        self._shared = None if settings.source.is_iterable else _socket_pair()
        self._poll = select.epoll()
        self._controls: list[socket.socket] = []
        self._processes: list[BaseProcess] = []
        self._by_descriptor: dict[int, int] = {}
        self._claims = settings.mapping.claims
        self._finalizer = weakref.finalize(
            self, _end, os.getpid(), self._processes, self._controls, self._shared, self._poll
        )
        for number in range(settings.num_workers):
            self._start(number)

    @property
    def pids(self) -> list[int | None]:
        """The processes' ids, by worker."""
        return [process.pid for process in self._processes]

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
        """Waits for replies, which come with the worker's number; None instead of one says that the worker is dead."""
        descriptors = [descriptor for descriptor, _ in self._poll.poll(timeout_s)]
        workers = {self._by_descriptor[descriptor] for descriptor in descriptors}
        received: list[tuple[int, Reply | None]] = [pair for worker in workers for pair in self._read(worker)]
        dead = {worker for worker in workers if self._processes[worker].sentinel in descriptors}
        return received + [(worker, None) for worker in dead]

    def claim_of(self, worker: int) -> tuple[int, int]:
        """Number and attempt of the task that a worker took last; the number is -1 if none."""
        return split_claim(self._claims[worker])

    def exit_code(self, worker: int) -> int | None:
        """How a dead worker has ended; a signal is negative."""
        self._processes[worker].join()
        return self._processes[worker].exitcode

    def take_back(self) -> list[int]:
        """Empties the common queue; returns the numbers of the tasks, which nobody had taken."""
        assert self._shared is not None
        numbers = []
        with contextlib.suppress(BlockingIOError):
            while message := self._shared[1].recv(2 * MAX_MESSAGE, socket.MSG_DONTWAIT):
                numbers.append(split_claim(claim_in(message))[0])
        return numbers

    def restart(self, worker: int) -> None:
        """Puts a new process in the place of a dead one."""
        self._forget(worker)
        self._processes[worker].join()
        self._start(worker)

    def close(self) -> None:
        """Ends all workers."""
        self._finalizer()

    def _start(self, number: int) -> None:
        ours, theirs = _socket_pair()
        self._claims[number] = -1
        tasks = theirs if self._shared is None else self._shared[1]
        inherited: tuple[socket.socket, ...] = ()
        if self._context.get_start_method() == "fork":
            others = [control for control in self._controls if control.fileno() >= 0]
            inherited = (ours, *others, *([] if self._shared is None else self._shared[:1]))
        process = self._context.Process(  # type: ignore[attr-defined]
            target=run_worker, args=(self._settings, number, tasks, theirs, inherited), daemon=True
        )
        try:
            process.start()
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            ours.close()
            theirs.close()
            self.close()
            raise type(error)(
                f"{error}; workers that are started by {self._context.get_start_method()!r} get dataset, collate_fn and"
                " worker_init_fn pickled: define them in a module, or pass multiprocessing_context='fork'"
            ) from error
        theirs.close()
        self._controls[number:] = [ours, *self._controls[number + 1 :]]
        self._processes[number:] = [process, *self._processes[number + 1 :]]
        for descriptor in (ours.fileno(), process.sentinel):
            self._by_descriptor[descriptor] = number
            self._poll.register(descriptor, select.EPOLLIN)

    def _read(self, worker: int) -> Iterator[tuple[int, Reply]]:
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while message := self._controls[worker].recv(2 * MAX_MESSAGE, socket.MSG_DONTWAIT):
                yield worker, Reply(message)

    def _forget(self, worker: int) -> None:
        for descriptor in (self._controls[worker].fileno(), self._processes[worker].sentinel):
            self._by_descriptor.pop(descriptor, None)
            with contextlib.suppress(OSError):
                self._poll.unregister(descriptor)
        self._controls[worker].close()


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * MAX_MESSAGE)
    return pair


def _end(
    owner: int,
    processes: list[BaseProcess],
    controls: list[socket.socket],
    shared: tuple[socket.socket, socket.socket] | None,
    poll: select.epoll,
) -> None:
    if os.getpid() != owner:
        return  # a fork has copied the pool; the workers are not its own
    for sock in (*controls, *(shared or ())):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # also where other processes have inherited a copy
        sock.close()
    poll.close()
    until = time.monotonic() + _JOIN_S
    for process in processes:
        process.join(max(until - time.monotonic(), 0))
        if process.is_alive():
            process.kill()
            process.join()
