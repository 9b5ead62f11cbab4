"""Runs one function on N ranks, each a process, with a time-out that ends them."""

import faulthandler
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from benchmarks.cluster import unavailable_reason

# The fork server imports the heavy packages once; each rank then starts in a fraction of a second.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "lightning.pytorch", "torchmetrics"])


class RanksFailedError(AssertionError):
    """At least one rank raised, died or did not finish in time. The message has every rank's traceback."""


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 90,
    init_gloo: bool = True,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Calls ``function(rank, world_size, *args)`` in ``world_size`` processes and returns their results by rank.

    Args:
        function: A function of a module (it is pickled by name).
        world_size: Number of ranks.
        *args: Further arguments, picklable.
        timeout: Seconds until the ranks are killed and the call fails with the stack of each rank.
        init_gloo: Whether ``torch.distributed`` is initialised with gloo before the call. Without it the launcher's
            variables (``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_*``) are set all the same.
        env: Further environment variables.

    Raises:
        RanksFailedError: If a rank raised, died, or did not finish in time.
    """
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **(env or {})}
    processes, pipes = [], []
    for rank in range(world_size):
        receiver, sender = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_rank_main,
            args=(sender, function, rank, world_size, args, init_gloo, launch, timeout),
            daemon=True,
        )
        process.start()
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    try:
        return _collect(pipes, time.monotonic() + timeout)
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def _rank_main(
    sender: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    init_gloo: bool,
    launch: dict[str, str],
    timeout: float,
) -> None:
    import torch

    # Ranks are daemons, so that they end with pytest; a loader's workers are their children all the same.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    # A rank that hangs prints where, just before it is killed.
    faulthandler.dump_traceback_later(max(timeout - 1, 0.5), exit=False, file=sys.__stderr__)
    os.environ.update(launch, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    try:
        if init_gloo:
            torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
        outcome = (True, function(rank, world_size, *args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    # Plain pickle: `send` would share tensors through file descriptors that close with this process.
    sender.send_bytes(pickle.dumps(outcome))
    sender.close()
    faulthandler.cancel_dump_traceback_later()
    if init_gloo and outcome[0]:
        torch.distributed.destroy_process_group()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = dict(enumerate(pipes))
    while waiting:
        ready = wait(list(waiting.values()), timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            failures.update(dict.fromkeys(waiting, "did not finish in time (its stack is on stderr)"))
            break
        for rank, pipe in list(waiting.items()):
            if pipe in ready:
                del waiting[rank]
                try:
                    succeeded, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    succeeded, value = False, "died without a word"
                (results if succeeded else failures)[rank] = value
        if failures and waiting:
            # The peers of a rank that failed get a few seconds to report their own error.
            deadline = min(deadline, time.monotonic() + 10)
    if failures:
        raise RanksFailedError("\n".join(f"--- rank {rank}: {text}" for rank, text in sorted(failures.items())))
    return [results[rank] for rank in range(len(pipes))]


def require_cluster() -> None:
    """Skips the test where no cluster can be emulated; fails it if ``LIGHTNING_HPC_REQUIRE_ROOT=1``, as in CI."""
    reason = unavailable_reason()
    if reason is None:
        return
    if os.environ.get("LIGHTNING_HPC_REQUIRE_ROOT") == "1":
        pytest.fail(f"{reason}; LIGHTNING_HPC_REQUIRE_ROOT=1 forbids skipping")
    pytest.skip(reason)
