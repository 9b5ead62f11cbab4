"""The largest batch within a memory budget, and the tokens a second that it brings, by precision.

python -m benchmarks.micro.largest_batch --budget-mib 900
python -m benchmarks.micro.largest_batch --budget-mib 8000 --device cuda --depth 12 --width 768 --most 256

The example's language model under the Trainer, in float32, under bf16 autocast, with `MemoryAwarePrecision` that has
the budget, and with blocks checkpointed to fit besides. Each size is tried in a process of its own, and fits if the
steps of the second half stayed within the budget: on CUDA what the allocator handed out, which may not take more; on
the CPU what the process has, with a C library that gives back what is freed. Times are medians of those steps, in
``--rounds`` turns over the contenders, each with its own largest batch and with that of float32.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch

from examples.language_model import LanguageModel, StandardLibrary
from lightning_hpc.callbacks import ActivationCheckpointing, OutOfMemoryRecovery
from lightning_hpc.memory import BudgetProbe, default_probe
from lightning_hpc.memory.batch_search import BatchSearch
from lightning_hpc.memory.out_of_memory import is_out_of_memory
from lightning_hpc.precision import MemoryAwarePrecision

CONTENDERS = ("32-true", "bf16-mixed", "MemoryAwarePrecision", "with checkpointing")
CONTEXT = 128
# Of the budget, for saved activations, when blocks are checkpointed; weights and the process take the rest.
CHECKPOINTED_SHARE = 0.25


class Meter(pl.Callback):
    """Most bytes in use, and seconds of a step, over the second half of a fit."""

    def __init__(self, steps: int, probe: Any) -> None:
        self._from = steps // 2
        self._probe = probe
        self._ended = 0.0
        self.used = 0
        self.seconds: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Reads memory and clock."""
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        used, now = self._probe.read().used_bytes, time.perf_counter()
        if trainer.global_step > self._from:
            self.used = max(self.used, used)
            self.seconds.append(now - self._ended)
        self._ended = now


def run(args: argparse.Namespace) -> None:
    """Trains in this process, and prints what that took."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    budget = args.budget_mib * 2**20
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(budget / torch.cuda.mem_get_info(device)[1], device)
    meter = Meter(args.steps, BudgetProbe(default_probe(device), budget))
    callbacks: list[pl.Callback] = [meter]
    settings: dict[str, Any] = {}
    if args.contender in CONTENDERS[:2]:
        settings["precision"] = args.contender
    else:
        settings["plugins"] = [MemoryAwarePrecision(budget_bytes=budget, check_every_n_steps=1)]
        if device.type == "cuda":
            callbacks.append(OutOfMemoryRecovery())
    if args.contender == CONTENDERS[-1]:
        callbacks.append(ActivationCheckpointing(budget=int(CHECKPOINTED_SHARE * budget)))
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator=args.device,
        devices=1,
        max_steps=args.steps,
        callbacks=callbacks,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    try:
        trainer.fit(LanguageModel(width=args.width, depth=args.depth), StandardLibrary(CONTEXT, args.size))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        print(json.dumps({"used": budget + 1, "seconds": 1.0}))
        return
    print(json.dumps({"used": meter.used, "seconds": statistics.median(meter.seconds)}))


def trial(args: argparse.Namespace, contender: str, size: int, *, gives_back: bool = False) -> dict[str, float]:
    """What a fit with this batch size takes, in a process of its own, which may give back what it frees at once."""
    names = ("budget_mib", "device", "width", "depth", "steps")
    settings = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    command = [sys.executable, "-m", "benchmarks.micro.largest_batch", "--contender", contender, "--size", str(size)]
    # Or the C library keeps what was freed, and the process stays as large as it once was.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**17)} if gives_back else None
    done = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=1800, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"used"')]
    if not lines:
        raise RuntimeError(f"{contender}, {size}: {done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(lines[-1])
    return result


def largest(args: argparse.Namespace, contender: str) -> int:
    """The largest batch that fits; 0 if none does."""
    search = BatchSearch(range(1, args.most + 1))
    while (size := search.size) is not None:
        used = trial(args, contender, size, gives_back=True)["used"]
        fits = used <= args.budget_mib * 2**20
        print(f"{contender}: {size} takes {used / 2**20:.0f} MiB, {'fits' if fits else 'too much'}", file=sys.stderr)
        search.answer(fits)
    return search.largest or 0


def compare(args: argparse.Namespace) -> None:
    """Prints the table."""
    sizes = {contender: largest(args, contender) for contender in CONTENDERS}
    base = sizes[CONTENDERS[0]]
    if not base:
        sys.exit(f"not even one sample fits {args.budget_mib} MiB in float32; give a larger --budget-mib")
    rates: dict[tuple[str, int], list[float]] = {}
    for turn in range(args.rounds):
        for contender in CONTENDERS if turn % 2 else CONTENDERS[::-1]:
            for size in dict.fromkeys((base, sizes[contender])):
                rate = size * CONTEXT / trial(args, contender, size)["seconds"]
                rates.setdefault((contender, size), []).append(rate)
    plain = rates[CONTENDERS[0], base]
    print(f"{args.device}, {args.budget_mib} MiB, width {args.width}, depth {args.depth}, {args.rounds} rounds")
    print(f"{'':<24}{'largest batch':>14}{'':>8}{'tokens a second beside float32, with':>40}")
    print(f"{'':<46}{f'{base} samples':>20}{'its largest':>20}")
    for contender in CONTENDERS:
        cells = [ratio(rates[contender, size], plain) for size in (base, sizes[contender])]
        print(f"{contender:<24}{sizes[contender]:>14}{sizes[contender] / base:>7.2f}x{cells[0]:>20}{cells[1]:>20}")


def ratio(rates: list[float], plain: list[float]) -> str:
    """Median and range of the ratios by round."""
    ratios = sorted(one / other for one, other in zip(rates, plain, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"


def main() -> None:
    """Parses the arguments and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-mib", type=int, default=900, help="memory that there is (default: 900)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--most", type=int, default=96, help="largest batch that is tried (default: 96)")
    parser.add_argument("--steps", type=int, default=20, help="of each fit (default: 20)")
    parser.add_argument("--rounds", type=int, default=3, help="of timed fits (default: 3)")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    run(args) if args.contender else compare(args)


if __name__ == "__main__":
    main()
