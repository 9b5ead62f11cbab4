"""What a worker process does: takes a task, reads its samples, puts the batch into the slot, says so."""

import contextlib
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from typing import Any

import torch

# DataLoader publishes what `get_worker_info` returns in this module, and has no setter for it.
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.collate import default_collate

from lightning_hpc.data.collating import SlotCollate, spare_shared_memory
from lightning_hpc.data.fetching import BatchSource, ExhaustedError, IterableFetcher, MapFetcher, set_epoch
from lightning_hpc.data.locality import stay_on
from lightning_hpc.data.mapping import SharedMapping
from lightning_hpc.data.messages import (
    GRANT,
    IDLE,
    MAX_MESSAGE,
    RETIRE,
    Reply,
    Task,
    claim_in,
    decode_grant,
    decode_task,
)
from lightning_hpc.data.packing import SlotTooSmallError, SlotWriter, copy_out
from lightning_hpc.data.seeding import mix, seed_all
from lightning_hpc.data.worker_errors import encode_error

_ORPHAN_CHECK_S = 0.5


@dataclass(frozen=True)
class WorkerSettings:
    """What all workers of a pool are given.

    Attributes:
        source: Where batches come from.
        init_fn: Called with the worker's number.
        num_workers: How many there are; at first, with a map-style dataset.
        seed: Of the first epoch.
        mapping: Where the slots are.
    """

    source: BatchSource
    init_fn: Callable[[int], None] | None
    num_workers: int
    seed: int
    mapping: SharedMapping


def run_worker(
    settings: WorkerSettings,
    number: int,
    tasks: socket.socket,
    control: socket.socket,
    inherited: tuple[socket.socket, ...],
) -> None:
    """The main function of a worker process.

    Args:
        settings: Those of the pool.
        number: Which of its workers this is.
        tasks: Where tasks come from; `control` itself for an iterable dataset.
        control: To the trainer's process and back.
        inherited: The trainer's ends of sockets, which a fork has copied.
    """
    for copied in inherited:
        copied.close()  # or the other workers would not see the trainer's process die
    stay_on(settings.mapping.near)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer's process handles Ctrl-C, and ends us
    threading.Thread(target=_die_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        _Worker(settings, number, tasks, control).run()
    except _TrainerGoneError:
        return  # nobody wants our batches any more


class _TrainerGoneError(Exception):
    """The trainer's ends of the sockets are closed. An OSError would look like one of the dataset's own."""


def _die_with_parent(parent: int) -> None:
    """Ends a worker whose trainer was killed while it reads a sample, however long that takes."""
    process = parent_process()
    sentinel = [] if process is None else [process.sentinel]
    while not connection.wait(sentinel, _ORPHAN_CHECK_S) and os.getppid() == parent:
        pass
    os._exit(1)


class _Worker:
    def __init__(self, settings: WorkerSettings, number: int, tasks: socket.socket, control: socket.socket) -> None:
        self._settings, self._number = settings, number
        self._tasks, self._control = tasks, control
        self._backlog: deque[bytes] = deque()
        self._claims = settings.mapping.claims
        self._writer = SlotWriter(settings.mapping.as_tensor())
        source = settings.source
        self._collates_in_slot = source.collate_fn is default_collate
        self._collate = SlotCollate(self._writer) if self._collates_in_slot else source.collate_fn
        self._fetch_map: MapFetcher | None = None
        self._fetch_iterable: IterableFetcher | None = None
        self._made = 0  # batches of an iterable dataset, in this epoch
        self._generation = -1

    def run(self) -> None:
        torch.set_num_threads(1)
        spare_shared_memory()
        failure = self._initialise()
        self._claims[self._number] = IDLE
        while message := self._receive(self._tasks):
            self._claims[self._number] = claim_in(message)
            if message == RETIRE:
                return
            task = decode_task(message, self._settings.mapping)
            self._send(failure(task) if failure is not None else self._do(task))

    def _initialise(self) -> Callable[[Task], bytes] | None:
        """Returns the reply to every task if the user's code failed."""
        settings = self._settings
        seed_all(mix(settings.seed, self._number))
        self._publish_seed(settings.seed)
        try:
            if settings.init_fn is not None:
                settings.init_fn(self._number)
            if not settings.source.is_iterable:
                self._fetch_map = MapFetcher(settings.source, self._collate, self._writer.restart)
        except Exception as error:
            body = encode_error(error, self._number)
            return lambda task: Reply.encode(Reply.ERROR, task, body=body)
        return None

    def _publish_seed(self, seed: int) -> None:
        settings = self._settings
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=self._number,
            num_workers=settings.num_workers,
            seed=seed + self._number,
            dataset=settings.source.dataset,
        )

    def _receive(self, sock: socket.socket) -> bytes:
        if self._backlog:
            return self._backlog.popleft()
        try:
            return sock.recv(2 * MAX_MESSAGE)
        except OSError as error:
            raise _TrainerGoneError from error

    def _send(self, message: bytes) -> None:
        try:
            self._control.send(message)
        except OSError as error:
            raise _TrainerGoneError from error

    def _do(self, task: Task) -> bytes:
        self._writer.open(task.offset, task.capacity)
        try:
            return self._pack(task, self._fetch(task))
        except ExhaustedError:
            return Reply.encode(Reply.EXHAUSTED, task)
        except _TrainerGoneError:
            raise
        except Exception as error:
            return Reply.encode(Reply.ERROR, task, body=encode_error(error, self._number))

    def _fetch(self, task: Task) -> Any:
        if task.generation != self._generation:
            self._generation = task.generation
            self._fetch_iterable, self._made = None, 0
            self._publish_seed(task.seed)
        if self._fetch_map is not None:
            set_epoch(self._settings.source.dataset, task.epoch)
            return self._fetch_map(task.index, task.seed)
        if self._fetch_iterable is None:
            seed_all(mix(task.seed, self._number))
            set_epoch(self._settings.source.dataset, task.epoch)
            self._fetch_iterable = IterableFetcher(self._settings.source, self._collate)
        while self._made < task.skip:
            with contextlib.suppress(Exception):  # whatever it was, it has been reported
                self._fetch_next(self._fetch_iterable, task)
        return self._fetch_next(self._fetch_iterable, task)

    def _fetch_next(self, fetch: IterableFetcher, task: Task) -> Any:
        self._made += 1
        self._writer.open(task.offset, task.capacity)
        return fetch(task.index)

    def _pack(self, task: Task, batch: Any) -> bytes:
        while True:
            try:
                packed = self._writer.pack(batch)
                if len(packed) <= MAX_MESSAGE:
                    return Reply.encode(Reply.BATCH, task, body=packed)
                return Reply.encode(Reply.SPILLED, task, self._writer.append(packed), str(len(packed)).encode())
            except SlotTooSmallError as error:
                if self._collates_in_slot:
                    batch = copy_out(batch, error.needed)  # with this message the slot is not ours any more
                self._send(Reply.encode(Reply.NEEDS, task, error.needed))
            self._writer.open(*self._wait_for_slot())

    def _wait_for_slot(self) -> tuple[int, int]:
        try:
            while message := self._control.recv(2 * MAX_MESSAGE):
                if message.startswith(GRANT):
                    return decode_grant(message)
                self._backlog.append(message)
        except OSError as error:
            raise _TrainerGoneError from error
        raise _TrainerGoneError
