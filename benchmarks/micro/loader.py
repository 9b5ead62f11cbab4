"""How fast `SharedMemoryLoader` hands batches over, against `DataLoader` in the same process, in turns.

python benchmarks/micro/loader.py
python benchmarks/micro/loader.py --batch-kb 1 --batches 2000 --workers 0 1 2

The samples lie in memory, so that nothing but the way of a batch is measured; the consumer reads every byte. Prints
GB/s, the ratio of the medians with its spread over rounds, the processors' time for each GB, and how long `next` takes.
The ceiling is a copy of a batch from warm memory to warm memory by one thread.
"""

import argparse
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_hpc.data import SharedMemoryLoader

SAMPLES_A_BATCH = 64
PEER, OWN = "DataLoader", "SharedMemoryLoader"
LOADERS: dict[str, Any] = {PEER: DataLoader, OWN: SharedMemoryLoader}


class Images(Dataset[Tensor]):
    """Bytes that are there already."""

    def __init__(self, sample_bytes: int, batches: int) -> None:
        self._samples = torch.randint(0, 255, (8, sample_bytes), dtype=torch.uint8)
        self._count = SAMPLES_A_BATCH * batches

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        if index >= self._count:
            raise IndexError(index)
        return self._samples[index % 8]


@dataclass(frozen=True)
class Round:
    """One epoch of one loader.

    Attributes:
        gb_s: Bytes handed over, in GB/s, without the first two batches.
        cpu_s_gb: Processor seconds of all processes for each GB, start included.
        waits: Seconds that each `next` took.
    """

    gb_s: float
    cpu_s_gb: float
    waits: list[float]


def measure(name: str, dataset: Images, workers: int) -> Round:
    """Reads one epoch."""
    before = cpu_seconds()
    loader = LOADERS[name](dataset, batch_size=SAMPLES_A_BATCH, num_workers=workers)
    waits, total = [], 0
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    began = last = time.perf_counter()
    for batch in iterator:
        now = time.perf_counter()
        waits.append(now - last)
        read(batch)
        total += batch.numel()
        last = time.perf_counter()
    seconds = last - began
    del iterator, loader, batch  # the workers' time counts when they have ended
    return Round(total / seconds / 1e9, (cpu_seconds() - before) / (total / 1e9), waits)


def read(batch: Tensor) -> None:
    """Touches every byte."""
    flat = batch.view(-1)
    flat[: len(flat) // 8 * 8].view(torch.int64).sum()


def cpu_seconds() -> float:
    """Of this process and its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def copy_ceiling(numel: int) -> float:
    """GB/s of a warm copy."""
    source = torch.randint(0, 255, (numel,), dtype=torch.uint8)
    target = source.clone()
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return numel / statistics.median(seconds) / 1e9


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-kb", type=int, default=37_848, help="KB of a batch (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=60, help="batches an epoch (default: %(default)s)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of workers (default: 1 2)")
    parser.add_argument("--rounds", type=int, default=5, help="epochs of each loader (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dataset = Images(max(arguments.batch_kb * 1000 // SAMPLES_A_BATCH, 1), arguments.batches)
    print(f"{'workers':>7}  {'loader':<18}  {'GB/s':>7}  {'s/GB':>6}  {'next p50':>9}  {'p99':>9}  ratio (rounds)")
    for workers in arguments.workers:
        rounds: dict[str, list[Round]] = {name: [] for name in LOADERS}
        ceilings = []
        for number in range(arguments.rounds):
            ceilings.append(copy_ceiling(max(arguments.batch_kb * 1000, 1_000_000)))
            for name in list(LOADERS)[:: 1 if number % 2 else -1]:
                rounds[name].append(measure(name, dataset, workers))
        for name in LOADERS:
            show(workers, name, rounds, statistics.median(ceilings))


def show(workers: int, name: str, rounds: dict[str, list[Round]], ceiling: float) -> None:
    """Prints a line of the table."""
    own, peer = ([one.gb_s for one in rounds[key]] for key in (name, PEER))
    waits = sorted(1e3 * wait for one in rounds[name] for wait in one.waits)
    ratios = [one / other for one, other in zip(own, peer, strict=True)]
    cpu = statistics.median(one.cpu_s_gb for one in rounds[name])
    print(
        f"{workers:>7}  {name:<18}  {statistics.median(own):7.3f}  {cpu:6.3f}"
        f"  {statistics.median(waits):7.3f}ms  {waits[int(0.99 * len(waits))]:7.3f}ms"
        f"  {statistics.median(own) / statistics.median(peer):.2f} ({min(ratios):.2f} to {max(ratios):.2f}),"
        f" {statistics.median(own) / ceiling:.2f} of a copy's {ceiling:.1f} GB/s",
        flush=True,
    )


if __name__ == "__main__":
    main()
