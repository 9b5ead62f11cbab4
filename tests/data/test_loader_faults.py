"""Whatever breaks: the right error, no sample lost or read twice, no process left behind, and the iterator goes on.

`python -m tests.data.soak_loader` runs `kill_at_random` for long.
"""

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from lightning_hpc.data.loader import SharedMemoryLoader
from tests.data.datasets import Nested, Numbers, Parts, assert_same

_ROOT = Path(__file__).parents[2]
_WAIT_S = 60


class ManyArgumentsError(Exception):
    def __init__(self, one: int, two: int, three: int) -> None:
        super().__init__(f"{one} {two} {three}")


def unpicklable_error() -> Exception:
    class LocalError(Exception):
        pass

    return LocalError("planted")


class Raising(Numbers):
    """Sample 1 raises what `make_error` makes."""

    def __init__(self, make_error: Callable[[], Exception]) -> None:
        super().__init__(4)
        self.make_error = make_error

    def __getitem__(self, index: int) -> Tensor:
        if index == 1:
            raise self.make_error()
        return super().__getitem__(index)


class Unequal(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        return torch.full((index,), index)


class WithoutLength(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return index


class RaisingPart(Parts):
    def __iter__(self) -> Iterator[Tensor]:
        yield from itertools.islice(super().__iter__(), 2)
        raise OSError(5, "planted")


class NeverBegins(Parts):
    def __iter__(self) -> Iterator[Tensor]:
        raise LookupError("planted")


def fail(*_: Any) -> None:
    raise ZeroDivisionError("planted")


FAULTS: dict[str, dict[str, Any]] = {
    "many arguments": {"dataset": Raising(lambda: ManyArgumentsError(1, 2, 3))},
    "KeyError": {"dataset": Raising(lambda: KeyError("planted"))},
    "connection": {"dataset": Raising(lambda: ConnectionResetError("planted"))},
    "decoding": {"dataset": Raising(lambda: UnicodeDecodeError("utf8", b"x", 0, 1, "planted"))},
    "StopIteration": {"dataset": Raising(lambda: StopIteration("planted"))},
    "long text": {"dataset": Raising(lambda: ValueError("\U0001f600" * 10**5))},
    "collate_fn": {"dataset": Numbers(4), "collate_fn": fail},
    "unequal sizes": {"dataset": Unequal(5), "batch_size": 2},
    "longer than it says": {"dataset": Numbers(5, claimed=3)},
    "shorter than it says": {"dataset": Numbers(3, claimed=5)},
    "part": {"dataset": RaisingPart(9)},
}


def outcomes(loader: Any) -> list[Any]:
    """Batches, and the types of errors between them."""
    iterator, found = iter(loader), list[Any]()
    while True:
        try:
            found.append(next(iterator))
        except StopIteration:
            return found
        except Exception as error:
            found.append(type(error))


def read_on(batches: Iterator[Tensor], found: list[int]) -> None:
    for batch in batches:
        found.append(int(batch[0, 0]))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kwargs", FAULTS.values(), ids=FAULTS)
def test_errors_have_the_type_that_dataloader_gives_them_and_the_iterator_goes_on(kwargs: Any, workers: int) -> None:
    expected = outcomes(DataLoader(num_workers=workers, **kwargs))
    assert_same(outcomes(SharedMemoryLoader(num_workers=workers, **kwargs)), expected)


@pytest.mark.parametrize(
    ("make_error", "kind"), [(unpicklable_error, RuntimeError), (lambda: KeyError("planted"), KeyError)]
)
def test_the_error_of_a_worker_has_its_traceback_also_where_its_type_cannot_be_had(make_error: Any, kind: Any) -> None:
    loader = SharedMemoryLoader(Raising(make_error), num_workers=1)
    with pytest.raises(kind, match=r"(?s)^Caught \w+Error in worker process 0 .*\n.*test_loader_faults.*planted"):
        list(loader)
    assert len(outcomes(loader)) == 4


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_without_length_is_refused_as_by_dataloader(workers: int) -> None:
    with pytest.raises(TypeError, match="has no len"):
        next(iter(SharedMemoryLoader(WithoutLength(), num_workers=workers)))


@pytest.mark.parametrize("kwargs", [{"worker_init_fn": fail, "dataset": Numbers(2)}, {"dataset": NeverBegins(2)}])
def test_what_fails_when_a_worker_begins_is_raised(kwargs: Any) -> None:
    loader = SharedMemoryLoader(num_workers=1, **kwargs)
    for _ in range(2):
        iterator = iter(loader)
        for _ in range(2):
            with pytest.raises((ZeroDivisionError, LookupError), match="planted"):
                next(iterator)


class NotPicklable(Numbers):
    def __reduce__(self) -> Any:
        raise TypeError("a lock is not to be pickled")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_dataset_that_cannot_be_pickled_is_an_error_that_says_what_to_do(method: str) -> None:
    loader = SharedMemoryLoader(NotPicklable(3), num_workers=2, multiprocessing_context=method)
    with pytest.raises(TypeError, match=r"a lock.*multiprocessing_context='fork'"):
        iter(loader)


def pids_of(loader: SharedMemoryLoader[Any]) -> list[int]:
    assert loader._stream is not None
    return [pid or 0 for pid in loader._stream.pids]


def test_a_worker_that_is_stopped_runs_into_the_time_out_and_may_go_on_later() -> None:
    loader = SharedMemoryLoader(Numbers(9), num_workers=1, timeout=0.2)
    iterator = iter(loader)
    found = [int(next(iterator)[0, 0])]
    (pid,) = pids_of(loader)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match=r"timed out after 0\.2 seconds"):
        read_on(iterator, found)
    os.kill(pid, signal.SIGCONT)
    while len(found) < 9:
        with contextlib.suppress(RuntimeError):  # a slow machine may take longer than that
            read_on(iterator, found)
    assert found == list(range(9))


class Deadly(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        if index == 5:
            os._exit(3)
        return super().__getitem__(index)


class DeadlyPart(Parts):
    def __iter__(self) -> Iterator[Tensor]:
        for sample in super().__iter__():
            if int(sample[0]) == 5:
                os._exit(3)
            yield sample


@pytest.mark.filterwarnings("ignore:worker .* was replaced")
@pytest.mark.parametrize(
    ("dataset", "text", "others"),
    [
        (Deadly(9), r"code 3.*samples \[5\]", [0, 1, 2, 3, 4, 6, 7, 8]),
        (DeadlyPart(9), "code 3.*batch 2", [0, 1, 2, 3, 4, 6, 8]),  # what comes after it in that part is not to be had
    ],
)
def test_a_sample_that_ends_each_worker_is_named_and_the_others_are_read(
    dataset: Any, text: str, others: list[int]
) -> None:
    loader = SharedMemoryLoader(dataset, num_workers=2)
    for _ in range(2):
        iterator, found = iter(loader), list[int]()
        with pytest.raises(RuntimeError, match=text):
            read_on(iterator, found)
        read_on(iterator, found)
        assert found == others


@pytest.mark.filterwarnings("ignore:worker .* was replaced")
@pytest.mark.parametrize("dataset", [Numbers(3), Parts(3)], ids=["map", "iterable"])
def test_workers_that_die_at_once_are_an_error_not_an_endless_loop(dataset: Any) -> None:
    loader = SharedMemoryLoader(dataset, num_workers=1, worker_init_fn=lambda _: os._exit(7))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"exited unexpectedly with code 7.*before"):
            next(iter(loader))


class Jittery(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        time.sleep(random.Random(index).random() * 2e-3)
        return super().__getitem__(index)


class JitteryPart(Parts):
    def __iter__(self) -> Iterator[Tensor]:
        for sample in super().__iter__():
            time.sleep(random.Random(int(sample[0])).random() * 2e-3)
            yield sample


def kill_at_random(runs: int, seed: int) -> int:
    """Kills workers at random moments of epochs that go on, break off and begin again; returns how many."""
    kills = 0
    for run in range(seed, seed + runs):
        rng = random.Random(run)
        workers, prefetch, length = rng.choice([1, 2, 3]), rng.choice([1, 2, 4]), rng.choice([40, 90])
        datasets = [
            Jittery(length, rng.choice([4, 5000])),
            JitteryPart(length, [rng.choice([7, 10**6]) for _ in "123"]),
        ]
        loader = SharedMemoryLoader(
            rng.choice(datasets), rng.choice([1, 3]), num_workers=workers, prefetch_factor=prefetch
        )
        expected = list(loader)
        for stop in (rng.choice([None, 10]), None):
            found, kept, since = list[Tensor](), [], 0
            for batch in itertools.islice(loader, stop):
                found.append(batch.clone())
                kept.append(batch)
                since += 1
                if since > workers * prefetch + 2 and rng.random() < 0.2:
                    since = 0
                    pid = rng.choice(pids_of(loader))
                    threading.Timer(rng.random() * 5e-3, os.kill, (pid, signal.SIGKILL)).start()
                    kills += 1
            assert_same(found, expected[: len(found)])
            assert len(found) == len(expected[:stop])
            assert_same(kept, found)
        assert loader._stream is not None
        assert loader._stream._ring.count < 2 * loader._stream._ring._limit
    return kills


@pytest.mark.filterwarnings("ignore:worker .* was replaced")
def test_workers_may_be_killed_at_any_moment_and_every_batch_comes_once_and_in_order() -> None:
    assert kill_at_random(4, seed=0) > 4


def test_a_worker_that_was_replaced_is_reported_and_a_warning_that_is_an_error_does_no_harm() -> None:
    loader = SharedMemoryLoader(Numbers(30), num_workers=1)
    iterator = iter(loader)
    found = [int(next(iterator)[0, 0])]
    os.kill(pids_of(loader)[0], signal.SIGKILL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="worker 0 of the loader of a Numbers has ended with code -9"):
            read_on(iterator, found)
    read_on(iterator, found)
    assert found == list(range(30))


class Sleeping(Numbers):
    """Sample 5 takes for ever."""

    def __getitem__(self, index: int) -> Tensor:
        if index == 5:
            time.sleep(10**6)
        return super().__getitem__(index)


def train(*methods: str) -> None:
    """A trainer that waits for ever: prints the process ids of its workers, which read a sample or wait for a task."""
    loaders = [
        SharedMemoryLoader(Sleeping(9), num_workers=2 if method == "fork" else 1, multiprocessing_context=method)
        for method in methods
    ]
    iterators = [iter(loader) for loader in loaders]
    for _ in range(5):
        for iterator in iterators:
            next(iterator)
    print(*(pid for loader in loaders for pid in pids_of(loader)), flush=True)
    next(iterators[0])


@contextlib.contextmanager
def trainer(*methods: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    code = f"from tests.data.test_loader_faults import train; train(*{methods})"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    try:
        assert len(pids) > len(methods)
        yield process, pids
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def require_end(pids: list[int]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, running
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_no_worker_outlives_a_trainer_that_was_killed_and_nothing_is_left_in_shared_memory() -> None:
    with trainer("fork", "forkserver", "spawn") as (process, pids):
        process.kill()
        process.wait()
        require_end(pids)
        names = [path.name for path in Path("/dev/shm").iterdir()]
        assert not [name for name in names for pid in (process.pid, *pids) if str(pid) in name]


def test_an_interrupt_from_the_keyboard_ends_trainer_and_workers_with_one_traceback() -> None:
    with trainer("fork") as (process, pids):
        os.killpg(process.pid, signal.SIGINT)
        errors = process.communicate(timeout=_WAIT_S)[1]
        assert process.returncode == -signal.SIGINT
        assert errors.count("Traceback") == 1
        assert errors.rstrip().endswith("KeyboardInterrupt")
        require_end(pids)


def run_forked(function: Callable[[], None]) -> int | None:
    """Exit code of a function in a process of its own, that has to end in time."""
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    process.join(_WAIT_S)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode


def load_with_few_descriptors() -> None:
    used = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    free = (number for number in itertools.count() if number not in used)
    limit = next(itertools.islice(free, 64 - 3, None))  # as in a process that has opened nothing else
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    loaders = [SharedMemoryLoader(Nested(64), 2, num_workers=8), SharedMemoryLoader(Parts(64), 2, num_workers=3)]
    held = [list(loader) for _ in range(2) for loader in loaders]
    assert [len(batches) for batches in held] == [32, 33, 32, 33]


def test_64_descriptors_are_enough() -> None:
    assert run_forked(load_with_few_descriptors) == 0


class Labelled(Tensor):
    """Not stacked into a slot, as nobody knows what its class does."""


class OfLabelled(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index).as_subclass(Labelled)


def collate(samples: Any) -> Any:
    return default_collate(samples)


_NO_RIGHTS = 77


def load_with_little_shared_memory() -> None:
    clone_newns = 0x20000
    if ctypes.CDLL(None).unshare(clone_newns):
        os._exit(_NO_RIGHTS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"], check=True)
    for dataset, function in itertools.product([Numbers(32, 200_000), OfLabelled(32, 200_000)], [None, collate]):
        held = list(SharedMemoryLoader(dataset, 8, num_workers=2, collate_fn=function))
        assert [float(row.mean()) for batch in held for row in batch] == list(range(32))


@pytest.mark.root
def test_a_shared_memory_file_system_of_1_mib_is_enough() -> None:
    code = run_forked(load_with_little_shared_memory)
    if code == _NO_RIGHTS and os.environ.get("LIGHTNING_HPC_REQUIRE_ROOT") != "1":
        pytest.skip("needs root, for a mount of its own")
    assert code == 0


class Forever(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return itertools.count(info.id, info.num_workers)


def test_a_loader_may_be_left_in_the_middle_of_an_endless_epoch() -> None:
    loader = SharedMemoryLoader(Forever(), 4, num_workers=2)
    for _ in range(3):
        assert torch.cat(list(itertools.islice(loader, 4))).tolist() == [
            *(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)
        ]
