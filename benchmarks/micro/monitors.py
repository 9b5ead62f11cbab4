"""What `StragglerMonitor` and `MemoryMonitor` cost on this machine.

python -m benchmarks.micro.monitors
python -m benchmarks.micro.monitors --ranks 4 --interval 50

The calls are timed as the training makes them, on rank 0, which judges. In between a step sleeps, so that the caches of
the processor are as cold as after a step's work. The last column is the processor time of all threads of rank 0, less
that of the same steps without the monitor.
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from lightning_hpc.callbacks import memory_monitor, straggler_monitor
from lightning_hpc.callbacks.memory_monitor import MemoryMonitor
from lightning_hpc.callbacks.straggler_monitor import StragglerMonitor

WINDOWS = 40
STEP_S = 0.001
SLOW_MS = 2.0


class Feed:
    """As much of a `StepTrace` as the monitors ask for."""

    listener: Any = None

    @staticmethod
    def find(trainer: Any) -> Any:
        """The Trainer's."""
        return trainer.feed

    def listen(self, listener: Any) -> None:
        """Takes the monitor's listener."""
        self.listener = listener

    def write_event(self, *args: Any) -> None:
        """Writes nothing."""

    def write_memory(self, *args: Any) -> None:
        """Writes nothing."""


def make_trainer(rank: int, ranks: int) -> Any:
    """As much of a Trainer as the monitors ask for."""
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    state = {"loggers": [], "global_step": 0, "log_every_n_steps": 50, "feed": Feed(), "strategy": strategy}
    return SimpleNamespace(world_size=ranks, is_global_zero=rank == 0, **state)


def make_step(rank: int, step: int, slow_ms: float) -> tuple[float, ...]:
    """The times of a step: rank 1 works longer, and the others wait."""
    noise = 0.02 * ((step * 7919 + rank * 104729) % 101) / 101
    own = slow_ms if rank == 1 else 0.0
    charged = (0.1, 0.0, 0.5, 3.0 + noise, 6.0 + own, slow_ms - own, 0.4, 0.0)
    return (*charged, sum(charged), 0, step)


def time_stragglers(rank: int, ranks: int, interval: int, slow_ms: float, port: int, results: Any) -> None:
    """Measures on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    vars(straggler_monitor)["StepTrace"] = Feed
    monitor, trainer = StragglerMonitor(interval), make_trainer(rank, ranks)
    monitor.on_train_start(trainer, None)  # type: ignore[arg-type]
    calls: dict[str, list[float]] = {"step": [], "send": [], "receive": []}
    processor = []
    for is_on in (True, False):
        dist.barrier()
        before = time.process_time()
        for step in range(WINDOWS * interval):
            time.sleep(STEP_S)
            times = make_step(rank, step, slow_ms)
            waits = monitor._is_waiting
            started = time.perf_counter()
            if is_on:
                trainer.feed.listener(times)
                kind = "send" if (step + 1) % interval == 0 else "receive" if waits else "step"
                calls[kind].append((time.perf_counter() - started) * 1e6)
        processor.append((time.process_time() - before) * 1e6)
    monitor.on_train_end(trainer, None)  # type: ignore[arg-type]
    if rank == 0:
        receiving = sum(calls["receive"]) / WINDOWS
        send = statistics.median(calls["send"])
        results.put((statistics.median(calls["step"]), send, receiving, (processor[0] - processor[1]) / WINDOWS))
    dist.destroy_process_group()


def measure_stragglers(ranks: int, interval: int, slow_ms: float) -> tuple[float, ...]:
    """Microseconds on rank 0: a step, and of an exchange the launch, the rest, and the processor time of all."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = [(rank, ranks, interval, slow_ms, port, results) for rank in range(ranks)]
    processes = [context.Process(target=time_stragglers, args=each) for each in arguments]
    for process in processes:
        process.start()
    figures: tuple[float, ...] = results.get(timeout=120)
    for process in processes:
        process.join()
    return figures


def measure_memory() -> tuple[float, float]:
    """Microseconds: a batch without and one with a record; medians."""
    vars(memory_monitor)["StepTrace"] = Feed
    monitor, trainer = MemoryMonitor(interval=10), make_trainer(0, 1)
    monitor.on_train_start(trainer, None)  # type: ignore[arg-type]
    calls: tuple[list[float], list[float]] = ([], [])
    for batch in range(2, 5001):
        started = time.perf_counter()
        monitor.on_train_batch_end(trainer, None, None, None, batch)  # type: ignore[arg-type]
        calls[batch % 10 == 1].append((time.perf_counter() - started) * 1e6)
    return statistics.median(calls[0]), statistics.median(calls[1])


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--interval", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"{'StragglerMonitor, µs':<24}{'a step':>10}{'launch':>10}{'receive':>10}{'all threads':>14}")
    for name, slow_ms in (("equal ranks", 0.0), ("one slow rank", SLOW_MS)):
        for _ in range(options.rounds):
            step, launch, receive, processor = measure_stragglers(options.ranks, options.interval, slow_ms)
            print(f"{name:<24}{step:>10.1f}{launch:>10.0f}{receive:>10.0f}{processor:>14.0f}")
    quiet, recording = measure_memory()
    print(f"MemoryMonitor, µs: a batch {quiet:.2f}, one with a record {recording:.0f}")


if __name__ == "__main__":
    main()
