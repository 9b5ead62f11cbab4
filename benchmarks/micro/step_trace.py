"""What `StepTrace` costs a step, beside no callback, Lightning's profilers and traceml-ai.

python -m benchmarks.micro.step_trace --rounds 10
python -m benchmarks.micro.step_trace --rounds 10 --step-ms 2.5
python -m benchmarks.micro.step_trace --memory

Each fit is a process of its own, and the contenders take turns, forwards and backwards. The first is run twice a round,
so that the difference between the two (A/A) shows what this machine's noise amounts to. Microseconds are of wall time
and of processor time a step, as medians over the rounds of the difference to the first, with 95 % bootstrap intervals.
traceml-ai takes part where it is installed (``pip install traceml-ai``); it runs as its Lightning callback, with its
sampling runtime in the process and no aggregator to send to.
"""

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hpc.callbacks import StepTrace

CONTENDERS = ("nothing", "nothing again", "StepTrace", "SimpleProfiler", "AdvancedProfiler", "traceml-ai")
WARM_UP_STEPS = 300
ROWS = 8


class Model(pl.LightningModule):
    """A layer, and as many products of matrices as a step is to take."""

    def __init__(self, products: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.products = products
        self.matrix = torch.eye(64)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Returns a loss."""
        for _ in range(self.products):
            self.matrix @ self.matrix
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The plainest."""
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Meter(pl.Callback):
    """Clocks and memory from the end of the warm-up to the end of the fit."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        """Starts the clocks."""
        if index == WARM_UP_STEPS:
            self.bytes = anonymous_bytes()
            self.wall, self.cpu = time.perf_counter(), time.process_time()

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Prints what has passed."""
        steps = trainer.global_step - WARM_UP_STEPS
        wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        grown = anonymous_bytes() - self.bytes
        print(json.dumps({"wall_us": wall / steps * 1e6, "cpu_us": cpu / steps * 1e6, "grown_bytes": grown}))


def anonymous_bytes() -> int:
    """Memory of this process that no file stands for."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def products_of(step_ms: float) -> int:
    """How many products of matrices fill a step, beside what Lightning takes."""
    matrix = torch.eye(64)
    start = time.perf_counter()
    for _ in range(2000):
        matrix @ matrix
    return max(0, round((step_ms - 0.4) / ((time.perf_counter() - start) / 2000 * 1e3)))


def fit(contender: str, steps: int, products: int) -> None:
    """Trains in this process."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp()
    callbacks: list[pl.Callback] = [Meter()]
    profiler = None
    if contender == "StepTrace":
        callbacks.append(StepTrace(folder, console=False))
    elif contender == "SimpleProfiler":
        profiler = pl.profilers.SimpleProfiler(folder, "simple")
    elif contender == "AdvancedProfiler":
        profiler = pl.profilers.AdvancedProfiler(folder, "advanced")
    elif contender == "traceml-ai":
        callbacks.append(make_traceml(folder))
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        callbacks=callbacks,
        profiler=profiler,
        **dict.fromkeys(quiet, False),  # type: ignore[arg-type]
    )
    trainer.fit(Model(products), DataLoader([torch.randn(ROWS, 8)] * steps, batch_size=None))


def make_traceml(folder: str) -> pl.Callback:
    """traceml-ai's callback, recording."""
    import traceml_ai
    from traceml_ai.integrations.lightning import TraceMLCallback

    traceml_ai.init(mode="manual", logs_dir=folder, ui_mode="summary", on_missing_aggregator="warn")
    return TraceMLCallback()


def run(contender: str, steps: int, products: int) -> dict[str, float]:
    """Trains in a fresh process."""
    arguments = ["--contender", contender, "--steps", str(steps), "--products", str(products)]
    command = [sys.executable, "-m", "benchmarks.micro.step_trace", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    results = [line for line in done.stdout.splitlines() if line.startswith('{"wall_us"')]
    if not results:
        raise RuntimeError(f"{contender}: {done.stderr[-2000:]}")
    return dict(json.loads(results[-1]))


def interval(differences: list[float]) -> str:
    """Median with its bootstrap interval."""
    chosen = np.random.default_rng(0).choice(differences, (2000, len(differences)))
    low, high = np.quantile(np.median(chosen, axis=1), [0.025, 0.975])
    return f"{np.median(differences):8.1f} ({low:.1f} to {high:.1f})"


def compare(contenders: list[str], rounds: int, steps: int, products: int) -> None:
    """Prints what each contender costs beyond the first."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for index in range(rounds):
        for name in contenders if index % 2 else contenders[::-1]:
            print(f"\rround {index + 1} of {rounds}: {name:<20}", end="", file=sys.stderr, flush=True)
            results[name].append(run(name, steps, products))
    print(file=sys.stderr)
    base = results[contenders[0]]
    print(f"a step with nothing: {np.median([each['wall_us'] for each in base]):.0f} µs")
    print(f"{'more than that, in µs':<24}{'wall time':<32}processor time")
    for name in contenders[1:]:
        columns = [
            interval([each[key] - zero[key] for each, zero in zip(results[name], base, strict=True)])
            for key in ("wall_us", "cpu_us")
        ]
        print(f"{name:<24}{columns[0]:<32}{columns[1]}")


def main() -> None:
    """Parses the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="fits of each contender (default: 10)")
    parser.add_argument("--steps", type=int, default=3000, help="batches a fit (default: 3000)")
    parser.add_argument("--step-ms", type=float, default=0.0, help="fill steps up to so many milliseconds (default: 0)")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="contenders (default: all)")
    parser.add_argument("--memory", action="store_true", help="memory growth over 100,000 steps instead of time")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--products", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        return fit(arguments.contender, arguments.steps, arguments.products)
    contenders = [name for name in CONTENDERS if name in arguments.only]
    if find_spec("traceml_ai") is None and "traceml-ai" in contenders:
        contenders.remove("traceml-ai")
        print("traceml-ai is not installed, and left out")
    if arguments.memory:
        for name in contenders:
            print(f"{name:<24}{run(name, 100_000 + WARM_UP_STEPS, 0)['grown_bytes'] / 1e6:8.2f} MB more memory")
        return None
    return compare(contenders, arguments.rounds, arguments.steps, products_of(arguments.step_ms))


if __name__ == "__main__":
    main()
