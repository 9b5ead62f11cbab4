"""Workers and the sockets to them: each task to one worker, deaths reported after the last word, nobody left behind."""

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from lightning_hpc.data import worker_pool
from lightning_hpc.data.fetching import BatchSource
from lightning_hpc.data.mapping import PAGE, SharedMapping
from lightning_hpc.data.messages import MAX_MESSAGE, Reply, Task
from lightning_hpc.data.packing import SlotTooSmallError, unpack
from lightning_hpc.data.worker import WorkerSettings
from lightning_hpc.data.worker_pool import WorkerPool
from tests.data.datasets import Parts, as_list

_WAIT_S = 30


class Behaving(Dataset[Any]):
    """A sample does what its index says."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        if index == "sleep":
            time.sleep(_WAIT_S)
        elif index == "die":
            os._exit(5)
        elif isinstance(index, list):
            return len(index)
        return index, get_worker_info().id  # type: ignore[union-attr]


class Told(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return info.id, info.num_workers


def task(number: int, index: Any, **kwargs: Any) -> Task:
    fields: dict[str, Any] = {"attempt": 0, "generation": 0, "seed": 1, "epoch": None, **kwargs}
    return Task(number=number, index=index, **{"offset": PAGE * (number + 1), "capacity": PAGE, **fields})


@contextmanager
def new_pool(dataset: Any, workers: int = 2, init_fn: Callable[[int], None] | None = None) -> Iterator[WorkerPool]:
    settings = WorkerSettings(BatchSource(dataset, as_list, False, False), init_fn, workers, 1, SharedMapping())
    pool = WorkerPool(settings, multiprocessing.get_context("fork"))
    with patch.object(worker_pool, "_JOIN_S", 0.2):
        yield pool
        pool.close()


def receive(pool: WorkerPool, at_least: int) -> list[tuple[int, Reply | None]]:
    received: list[tuple[int, Reply | None]] = []
    deadline = time.monotonic() + _WAIT_S
    while len(received) < at_least and time.monotonic() < deadline:
        received += pool.receive(1)
    assert len(received) >= at_least
    return received


def value(pool: WorkerPool, reply: Reply | None) -> Any:
    assert reply is not None
    assert reply.kind == Reply.BATCH, bytes(reply.body)
    return unpack(reply.body, pool._settings.mapping.view[PAGE * (reply.task + 1) :])


def is_alive(pid: int | None) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_each_task_is_done_by_one_worker() -> None:
    with new_pool(Behaving()) as pool:
        for number in range(50):
            assert pool.send(task(number, number))
        replies = receive(pool, 50)
        assert sorted(value(pool, reply)[0] for _, reply in replies) == list(range(50))
        assert all(value(pool, reply)[1] == worker for worker, reply in replies)


def test_a_slow_sample_holds_up_only_its_own_worker() -> None:
    with new_pool(Behaving()) as pool:
        pool.send(task(0, "sleep"))
        for number in range(1, 20):
            pool.send(task(number, number))
        replies = receive(pool, 19)
        assert len({worker for worker, _ in replies}) == 1
        (slow,) = {0, 1} - {worker for worker, _ in replies}
        assert pool.claim_of(slow) == (0, 0)


def test_workers_with_a_part_each_get_their_own_tasks() -> None:
    with new_pool(Parts(6)) as pool:
        for number in range(6):
            pool.send(task(number, None), worker=number % 2)
        values = {reply.task: int(value(pool, reply)[0]) for _, reply in receive(pool, 6) if reply is not None}
        assert values == {number: number for number in range(6)}


def test_a_death_is_reported_after_the_last_reply_with_what_the_worker_had() -> None:
    with new_pool(Behaving(), workers=1) as pool:
        for number, index in enumerate(["a", "b", "die", "c"]):
            pool.send(task(number, index))
        assert [reply and reply.task for _, reply in receive(pool, 3)] == [0, 1, None]
        assert pool.claim_of(0) == (2, 0)
        assert pool.exit_code(0) == 5
        assert pool.take_back() == [3]
        assert pool.take_back() == []


def test_a_new_worker_takes_the_place_of_a_dead_one() -> None:
    with new_pool(Behaving()) as pool:
        pids = pool.pids
        os.kill(pids[1] or 0, signal.SIGKILL)
        assert receive(pool, 1) == [(1, None)]
        assert pool.exit_code(1) == -signal.SIGKILL
        assert pool.replace(1)
        assert pool.claim_of(1)[0] == -1
        assert pool.pids[0] == pids[0]
        for number in range(20):
            pool.send(task(number, number))
        assert len(receive(pool, 20)) == 20
        assert pool.receive(0) == []


def settle(pool: WorkerPool) -> list[tuple[int, Reply | None]]:
    """Everything that is received until there are as many workers as wanted."""
    received: list[tuple[int, Reply | None]] = []
    deadline = time.monotonic() + _WAIT_S
    while not pool.is_settled and time.monotonic() < deadline:
        received += pool.receive(0.01)
    assert pool.is_settled
    return received


def test_workers_are_added_and_asked_to_end_while_there_is_work() -> None:
    with new_pool(Behaving()) as pool:
        done = []
        for first, workers in enumerate([4, 1, 3, 2]):
            pool.resize(workers)
            for number in range(20 * first, 20 * (first + 1)):
                assert pool.send(task(number, number))
            done += settle(pool)
            assert len(pool.pids) == workers
        done += receive(pool, 80 - len(done))
        assert sorted(value(pool, reply)[0] for _, reply in done) == list(range(80))
        assert set(pool.pids) <= {0, 1, 2, 3}


def test_a_worker_lives_until_its_replies_have_been_received() -> None:
    with new_pool(Behaving(), workers=1) as pool:
        for number in range(3):
            pool.send(task(number, number))
        assert pool._ask_to_retire()
        pool._retiring += 1
        connection.wait([pool._processes[0].sentinel], _WAIT_S)
        assert [reply and reply.task for _, reply in pool.receive(0)] == [0, 1, 2]
        assert pool.lives == {0: 0, 1: 1}  # one was wanted
        assert pool.receive(0) == []
        assert pool.lives == {1: 1}


def test_who_is_to_end_is_asked_again_if_the_queue_was_full_or_is_emptied() -> None:
    with new_pool(Behaving(), workers=2) as pool:
        for number in range(2):
            pool.send(task(number, "sleep"))
        while pool.claim_of(0)[0] < 0 or pool.claim_of(1)[0] < 0:
            pool.receive(0.01)
        long = list(range(10**4))
        while pool.send(task(2, long)):
            pass
        pool.resize(1)
        assert pool._retiring == 0
        pool.take_back()
        pool.receive(0)
        assert pool._retiring == 1
        assert pool.take_back() == []
        assert pool._retiring == 0
        pool.receive(0)
        assert pool._retiring == 1
        pool.resize(2)
        assert len(pool.pids) == 3  # one to end, one in its place
        assert {number: pool.claim_of(number)[0] >= 0 for number in pool.pids} == {0: True, 1: True, 2: False}


def test_workers_are_told_of_numbers_that_they_can_have() -> None:
    with new_pool(Told()) as pool:
        pool.resize(3)
        settle(pool)
        for number in range(60):
            pool.send(task(number, number))
        assert all(number < count for number, count in (value(pool, reply) for _, reply in receive(pool, 60)))


def test_a_full_queue_takes_no_more_until_somebody_has_read_from_it() -> None:
    with new_pool(Behaving(), workers=1) as pool:
        pool.send(task(0, "sleep"))
        long = list(range(10**4))
        numbers = iter(range(1, 1000))
        sent = [number for number in numbers if pool.send(task(number, long))]
        assert 2 <= len(sent) < 900
        assert pool.take_back()[-len(sent) + 1 :] == sent[1:]
        assert pool.send(task(1001, long))


def test_very_many_indices_travel_in_the_slot() -> None:
    with new_pool(Behaving(), workers=1) as pool:
        index = list(range(100_000))
        with pytest.raises(SlotTooSmallError) as caught:
            pool.send(task(0, index))
        assert caught.value.needed > MAX_MESSAGE
        pool.send(task(0, index, capacity=2 * caught.value.needed))
        assert value(pool, receive(pool, 1)[0][1]) == 100_000


def test_a_worker_that_needs_a_larger_slot_waits_for_it() -> None:
    with new_pool(Parts(9)) as pool:
        for number in range(3):
            pool.send(task(number, None, capacity=8), worker=0)
        replies: list[tuple[bytes, int]] = []
        while len(replies) < 6:
            for worker, reply in receive(pool, 1):
                assert reply is not None
                replies.append((reply.kind, reply.task))
                if reply.kind == Reply.NEEDS:
                    assert reply.number == 32
                    assert pool.receive(0.05) == []
                    pool.grant(worker, PAGE * (reply.task + 1), PAGE)
                else:
                    assert value(pool, reply).tolist() == [2 * reply.task] * 4
        assert replies == [(kind, number) for number in range(3) for kind in (Reply.NEEDS, Reply.BATCH)]


def test_close_ends_idle_workers_and_those_that_are_busy() -> None:
    with new_pool(Behaving()) as pool:
        pool.send(task(0, "sleep"))
        processes = list(pool._processes.values())
    assert sorted(process.exitcode or 0 for process in processes) == [-signal.SIGKILL, 0]
    pool.close()


def test_no_worker_is_left_when_a_pool_is_dropped() -> None:
    settings = WorkerSettings(BatchSource(Behaving(), as_list, False, False), None, 2, 1, SharedMapping())
    pool = WorkerPool(settings, multiprocessing.get_context("fork"))
    pids = [*pool.pids.values()]
    del pool
    assert not any(is_alive(pid) for pid in pids)


class NotPicklable(Behaving):
    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


def test_a_start_that_fails_says_what_to_do() -> None:
    settings = WorkerSettings(BatchSource(NotPicklable(), as_list, False, False), None, 2, 1, SharedMapping())
    with pytest.raises(TypeError, match=r"not to be pickled.*'spawn'.*module.*fork"):
        WorkerPool(settings, multiprocessing.get_context("spawn"))


def test_a_forked_process_that_drops_the_pool_leaves_it_as_it_is() -> None:
    with new_pool(Behaving()) as pool:
        child = os.fork()
        if not child:
            pool.close()
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        pool.send(task(0, "a"))
        assert value(pool, receive(pool, 1)[0][1])[0] == "a"


class Seeds(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        while True:
            yield info.seed, info.id, info.num_workers, info.dataset is self, float(torch.rand(1))


def test_worker_info_has_the_seed_of_the_epoch() -> None:
    with new_pool(Seeds()) as pool:
        for number, (generation, seed) in enumerate([(0, 5), (0, 5), (1, 6)]):
            pool.send(task(number, None, generation=generation, seed=seed), worker=1)
        first, second, third = (value(pool, reply) for _, reply in receive(pool, 3))
        assert (first[:4], second[:4], third[:4]) == ((6, 1, 2, True), (6, 1, 2, True), (7, 1, 2, True))
        assert len({first[4], second[4], third[4]}) == 3


def test_a_new_worker_passes_by_what_the_part_has_given_before() -> None:
    with new_pool(Parts(20)) as pool:
        pool.send(task(0, None, skip=4), worker=1)
        pool.send(task(1, None, skip=5), worker=1)
        pool.send(task(2, None, skip=0, generation=1), worker=1)
        assert [int(value(pool, reply)[0]) for _, reply in receive(pool, 3)] == [9, 11, 1]
