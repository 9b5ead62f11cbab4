"""The number of workers changes while an epoch runs, and nobody can tell by the batches, whatever dies meanwhile."""

import contextlib
import itertools
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hpc.data import worker
from lightning_hpc.data.loader import SharedMemoryLoader
from lightning_hpc.data.messages import RETIRE, RETIRING, claim_in, split_claim
from lightning_hpc.data.seeding import KeptGenerators
from tests.data.datasets import Augmented, Nested, Numbers, Parts, assert_same
from tests.data.test_batch_stream import assert_nothing_is_abandoned

_WAIT_S = 30


class Jittery(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        time.sleep(random.Random(index).random() * 2e-3)
        return super().__getitem__(index)


def kill_now() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def resize(loader: SharedMemoryLoader[Any], workers: int) -> None:
    assert loader._stream is not None
    loader._stream.resize(workers)


def settle(loader: SharedMemoryLoader[Any], batches: Iterator[Any]) -> Iterator[Any]:
    """Reads on until there are as many workers as wanted."""
    assert loader._stream is not None
    deadline = time.monotonic() + _WAIT_S
    while not loader._stream.is_settled:
        assert time.monotonic() < deadline
        yield next(batches)


def resize_at_random(runs: int, seed: int, kills: bool = True) -> tuple[int, int]:
    """Changes the number of workers at random moments of epochs that go on, break off and begin again, while workers
    are killed; returns how often both happened."""
    resized = killed = 0
    for run in range(seed, seed + runs):
        rng = random.Random(run)
        prefetch, length, batch_size = rng.choice([1, 2, 4]), rng.choice([40, 90]), rng.choice([1, 3])
        dataset = Jittery(length, rng.choice([4, 5000]))
        loader = SharedMemoryLoader(
            dataset, batch_size, shuffle=True, num_workers=rng.choice([1, 2, 3]), prefetch_factor=prefetch
        )
        peer = DataLoader(dataset, batch_size, shuffle=True)
        for stop in (rng.choice([None, 10]), rng.choice([None, 10]), None):
            with KeptGenerators():
                expected = list(peer)[:stop]
            found, kept, since = list[Tensor](), [], 0
            for batch in itertools.islice(loader, stop):
                found.append(batch.clone())
                kept.append(batch)
                since += 1
                assert loader._stream is not None
                if rng.random() < 0.25:
                    loader._stream.resize(rng.choice([1, 2, 3, 5]))
                    resized += 1
                if kills and since > 5 * prefetch + 2 and rng.random() < 0.2:
                    since = 0
                    kill_later(rng.choice(loader._stream.pids) or 0, rng.random() * 5e-3)
                    killed += 1
            assert_same(found, expected)
            assert_same(kept, found)
        assert loader._stream is not None
        loader._stream.resize(2)
        for _ in settle(loader, itertools.chain.from_iterable(itertools.repeat(loader))):
            pass
        assert len(loader._stream.pids) == 2
        assert_nothing_is_abandoned(loader)
    return resized, killed


def kill_later(pid: int, delay_s: float) -> None:
    """By a descriptor, since the process may have ended until then, and another one have its id."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)

    threading.Timer(delay_s, kill).start()


@pytest.mark.timeout(90)
@pytest.mark.filterwarnings("ignore:worker .* was replaced")
def test_resizes_and_deaths_at_any_moment_lose_and_repeat_nothing() -> None:
    resized, killed = resize_at_random(4, seed=0)
    assert resized > 40
    assert killed > 4


@pytest.mark.timeout(60)
def test_no_end_that_was_asked_for_is_taken_for_a_death() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert resize_at_random(2, seed=100, kills=False)[0] > 15


def test_random_samples_stay_the_same() -> None:
    with KeptGenerators():
        found = []
        for numbers in ([2, 2, 2], [1, 3, 2], [3, 1, 4]):
            torch.manual_seed(7)
            loader, batches = SharedMemoryLoader(Augmented(40), 2, num_workers=numbers[0]), []
            for position, batch in enumerate(itertools.chain(loader, loader)):
                batches.append(batch)
                resize(loader, numbers[position % 3])
            found.append(batches)
        assert_same(found[1], found[0])
        assert_same(found[2], found[0])


def test_batches_ahead_follow_the_number_of_workers() -> None:
    drawn: list[int] = []

    class Watched:
        def __iter__(self) -> Iterator[list[int]]:
            for index in range(60):
                drawn.append(index)
                yield [index]

    loader = SharedMemoryLoader(Numbers(60), batch_sampler=Watched(), num_workers=1, prefetch_factor=2)
    batches = iter(loader)
    for workers in (1, 4, 2):
        resize(loader, workers)
        for _ in range(12):
            number = int(next(batches)[0, 0])
        assert len(drawn) == number + 1 + 2 * workers
    assert [int(batch[0, 0]) for batch in batches] == list(range(36, 60))


def test_slots_that_batches_hold_follow_the_number_of_workers() -> None:
    loader = SharedMemoryLoader(Numbers(200, 1000), num_workers=4, prefetch_factor=4)
    batches = iter(loader)
    held = [next(batches)]
    resize(loader, 1)
    assert loader._stream is not None
    held.extend(batches)
    assert loader._stream._ring.count <= 2 * (16 + 4) + 4  # it was that many before
    assert [int(batch[0, 0]) for batch in held] == list(range(200))


def test_numbers_of_workers_are_used_again() -> None:
    loader = SharedMemoryLoader(Numbers(10**6), num_workers=3)
    batches = iter(loader)
    for workers in (1, 3, 2, 3):
        resize(loader, workers)
        list(settle(loader, batches))
        assert loader._stream is not None
        assert len(loader._stream._pool.pids) == workers
        assert max(loader._stream._pool.pids) < 5


def retired(loader: SharedMemoryLoader[Any], batches: Iterator[Any]) -> list[int]:
    """Reads on while one of two workers is asked to end; returns the numbers of the batches."""
    resize(loader, 1)
    found = [int(batch[0, 0]) for batch in settle(loader, batches)]
    assert loader._stream is not None
    assert len(loader._stream.pids) == 1
    return found


class KillsWhoCompares:
    def __eq__(self, message: object) -> bool:
        if message == RETIRE:
            kill_now()
        return False


def killed_before_it_says_so(message: bytes) -> int:
    claim = claim_in(message)
    if claim == RETIRING:
        kill_now()
    return claim


@pytest.mark.parametrize("patched", [("RETIRE", KillsWhoCompares()), ("claim_in", killed_before_it_says_so)])
def test_a_worker_that_is_killed_when_it_was_asked_to_end_has_ended(
    patched: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, *patched)
    loader = SharedMemoryLoader(Numbers(10**6), num_workers=2)
    batches = iter(loader)
    pids = set(loader._stream.pids) if loader._stream is not None else set()
    found = retired(loader, batches)
    assert loader._stream is not None
    assert set(loader._stream.pids) < pids
    found.extend(int(next(batches)[0, 0]) for _ in range(20))
    assert found == list(range(len(found)))


class Deadly(Numbers):
    """The first worker that reads sample 8 dies by that."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.is_dead = torch.zeros((), dtype=torch.bool).share_memory_()

    def __getitem__(self, index: int) -> Tensor:
        if index == 8 and not self.is_dead:
            self.is_dead.fill_(True)
            kill_now()
        return super().__getitem__(index)


def test_a_death_beside_an_end_that_was_asked_for_is_reported_once_and_the_number_comes_right() -> None:
    loader = SharedMemoryLoader(Deadly(10**6), num_workers=3)
    batches = iter(loader)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [int(next(batches)[0, 0])]
        resize(loader, 2)
        while len(found) < 10:
            found.append(int(next(batches)[0, 0]))
        found.extend(int(batch[0, 0]) for batch in settle(loader, batches))
    assert ["was replaced" in str(warning.message) for warning in caught] == [True]
    assert found == list(range(len(found)))
    assert loader._stream is not None
    assert len(loader._stream.pids) == 2


def dies_with(doomed: int) -> Callable[[bytes], int]:
    def claim(message: bytes) -> int:
        claimed = claim_in(message)
        if split_claim(claimed) == (doomed, 0):
            kill_now()
        return claimed

    return claim


@pytest.mark.filterwarnings("ignore:worker .* was replaced")
def test_no_slot_is_lost_with_a_worker_that_dies_before_it_says_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "claim_in", dies_with(7))
    loader = SharedMemoryLoader(Nested(40), num_workers=2)
    expected = list(DataLoader(Nested(40)))
    for _ in range(2):
        assert_same(list(loader), expected)
    assert_nothing_is_abandoned(loader)
    assert loader._stream is not None
    ring = loader._stream._ring
    assert ring.count <= ring._limit


@pytest.mark.filterwarnings("ignore:worker .* was replaced")
def test_no_slot_is_lost_if_nobody_waits_for_that_batch_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "claim_in", dies_with(3))
    loader = SharedMemoryLoader(Numbers(40, 1000), num_workers=2)
    next(iter(loader))
    for _ in range(2):
        assert [int(batch[0, 0]) for batch in loader] == list(range(40))
    assert_nothing_is_abandoned(loader)


def test_an_iterable_dataset_keeps_its_number_of_workers() -> None:
    loader = SharedMemoryLoader(Parts(20), num_workers=2)
    iter(loader)
    with pytest.raises(ValueError, match="iterable"):
        resize(loader, 3)
