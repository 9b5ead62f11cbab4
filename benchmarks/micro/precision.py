"""What `MemoryAwarePrecision` saves, what it costs, and whether the loss stays.

python -m benchmarks.micro.precision
python -m benchmarks.micro.precision --depth 12 --steps 12
python -m benchmarks.micro.precision --overhead --rounds 10
python -m benchmarks.micro.precision --fits --seeds 3

The first two: the example's language model in float32, with all units low, under plain bf16 autocast, and with all
units low and blocks checkpointed too. Bytes are the peak of what autograd saves, counted by storage; weights and what
else lives anyway do not count. Times are of forward, backward and AdamW, in turns in one process.

``--overhead``: a step of a Trainer without pressure, with the plugin and without, each fit a process of its own. The
fit without it runs twice a round, and the difference between the two (A/A) shows what this machine's noise amounts to.

``--fits``: validation loss after a fit, in float32 and with all modules low from one step on.
"""

import argparse
import copy
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import warnings
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.micro.activation_checkpointing import WARM_UP_STEPS, Training, seconds
from benchmarks.micro.activation_checkpointing import fit as fit_checkpoints
from benchmarks.micro.step_trace import ROWS, Meter, Model, interval, products_of
from examples.language_model import LanguageModel, StandardLibrary
from lightning_hpc.memory import CallableProbe, MemoryReading
from lightning_hpc.precision import MemoryAwarePrecision, PrecisionMap, find_units
from lightning_hpc.precision.memory_aware import KEEP_FLOAT32

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
OVERHEAD = ("nothing", "nothing again", "MemoryAwarePrecision")
UNITS = 12


def make_training(model: LanguageModel, contender: str) -> Training:
    """A copy of the model, trained in one of the ways that are compared."""
    model = copy.deepcopy(model)
    if "low" in contender:  # before blocks are checkpointed, as the plugin comes before the callback
        units = find_units(model).modules
        PrecisionMap(units, model.device.type, torch.bfloat16, KEEP_FLOAT32).set_low(list(units))
    training = Training(model, autocast=contender == "bf16-mixed")
    training.blocks.checkpoint(())
    return training


def compare_bytes(model: LanguageModel, batches: list[Tensor], budget: float) -> None:
    """Prints what each saves for backward, and its time beside that of float32."""
    names = ("float32", "all low", "bf16-mixed", "all low, checkpointed")
    trainings = {name: make_training(model, name) for name in names}
    trainings[names[-1]].blocks.checkpoint(trainings[names[-1]].blocks.names)
    fit_checkpoints(trainings[names[-1]], batches, budget)
    for name in names[:-1]:
        for batch in batches[: WARM_UP_STEPS + 1]:
            trainings[name].step(batch)
    saved = {name: training.saved_bytes(batches[0]) for name, training in trainings.items()}
    times: dict[str, list[float]] = {name: [] for name in names}
    for index, batch in enumerate(batches[WARM_UP_STEPS + 1 :]):
        for name in names if index % 2 else names[::-1]:
            times[name].append(seconds(trainings[name].step, batch)[0])
    print(f"{'':<24}{'saved MiB':>10}{'lower':>8}{'ms':>8}   time beside float32 (quartiles)")
    for name in names:
        ratios = [each / base - 1 for each, base in zip(times[name], times[names[0]], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name:<24}{saved[name] / 2**20:10.1f}{1 - saved[name] / saved[names[0]]:8.1%}"
            f"{1000 * statistics.median(times[name]):8.1f}   {middle:+.1%} ({low:+.1%} to {high:+.1%})"
        )


def run_bytes(args: argparse.Namespace) -> None:
    """Makes the model and its batches."""
    torch.manual_seed(0)
    data = StandardLibrary(batch_size=args.batch_size)
    data.setup("fit")
    loader = iter(data.train_dataloader())
    batches = [next(loader).to(args.device) for _ in range(args.steps + WARM_UP_STEPS + 1)]
    model = LanguageModel(width=args.width, depth=args.depth).to(args.device)
    model.log = lambda *_, **__: None  # type: ignore[method-assign]  # there is no Trainer
    print(f"{args.device}, {torch.get_num_threads()} threads, batch {args.batch_size} x 128, {dict(model.hparams)}")
    compare_bytes(model, batches, args.budget)


class Layers(Model):
    """Units enough for their calls to show, and products of matrices that fill the step."""

    def __init__(self, products: int) -> None:
        super().__init__(products)
        self.units = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(UNITS)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Returns a loss."""
        return super().training_step(self.units(batch), batch_idx)


def fit_overhead(contender: str, steps: int, products: int) -> None:
    """Trains in this process, and prints what a step takes."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    plugin = MemoryAwarePrecision(modules=["Linear"], high_watermark=2.0)
    plugins = [plugin] if contender == OVERHEAD[-1] else []
    trainer = pl.Trainer(max_steps=steps, accelerator="cpu", devices=1, plugins=plugins, callbacks=[Meter()], **QUIET)
    trainer.fit(Layers(products), DataLoader([torch.randn(ROWS, 8)] * steps, batch_size=None))
    assert not plugin.switches, "there was pressure"


def compare_overhead(rounds: int, steps: int, step_ms: float) -> None:
    """Prints what the plugin costs a step, each fit in a fresh process."""
    products = products_of(step_ms)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in OVERHEAD}
    for index in range(rounds):
        for name in OVERHEAD if index % 2 else OVERHEAD[::-1]:
            arguments = ["--contender", name, "--steps", str(steps), "--products", str(products)]
            command = [sys.executable, "-m", "benchmarks.micro.precision", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            lines = [line for line in done.stdout.splitlines() if line.startswith('{"wall_us"')]
            if not lines:
                raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
            results[name].append(json.loads(lines[-1]))
    base = results[OVERHEAD[0]]
    wall = float(np.median([each["wall_us"] for each in base]))
    print(f"a step with nothing: {wall:.0f} µs, of which 1 % is {wall / 100:.0f} µs; {UNITS + 1} units")
    print(f"{'more than that, in µs':<24}{'wall time':<32}processor time")
    for name in OVERHEAD[1:]:
        columns = [
            interval([each[key] - zero[key] for each, zero in zip(results[name], base, strict=True)])
            for key in ("wall_us", "cpu_us")
        ]
        print(f"{name:<24}{columns[0]:<32}{columns[1]}")


def fit_seed(seed: int, low_from: int | None, args: argparse.Namespace) -> tuple[float, int]:
    """Trains the language model.

    Returns:
        Its validation loss, and how many modules were low at the end.
    """
    pl.seed_everything(seed, verbose=False)
    model = LanguageModel(width=args.width, depth=args.depth)
    plugin = None
    if low_from is not None:

        def read() -> MemoryReading:
            # The limit is so high that all modules together save too little.
            return MemoryReading((95 if model.trainer.global_step >= low_from else 80) * 2**30, 100 * 2**30)

        plugin = MemoryAwarePrecision(probe=CallableProbe(read), check_every_n_steps=1)
    trainer = pl.Trainer(
        max_steps=args.steps,
        accelerator="cpu",
        plugins=[] if plugin is None else [plugin],
        limit_val_batches=args.val_batches,
        num_sanity_val_steps=0,
        default_root_dir=tempfile.gettempdir(),
        **QUIET,  # type: ignore[arg-type]
    )
    data: Any = StandardLibrary(batch_size=args.batch_size)
    trainer.fit(model, data)
    (metrics,) = trainer.validate(model, data, verbose=False)
    return float(np.log(metrics["val_perplexity"])), 0 if plugin is None else len(plugin.low_modules)


def compare_fits(args: argparse.Namespace) -> None:
    """Prints the validation loss by seed, and the spread of seeds beside the difference of precisions."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    losses: dict[int | None, list[float]] = {None: [], args.low_from: []}
    for seed in range(args.seeds):
        for low_from in losses:
            loss, low = fit_seed(seed, low_from, args)
            losses[low_from].append(loss)
            print(f"seed {seed}, {'float32' if low_from is None else f'{low} modules low'}: {loss:.4f}")
    plain, low_losses = losses[None], losses[args.low_from]
    differences = [low - full for full, low in zip(plain, low_losses, strict=True)]
    print(
        f"nats a byte after {args.steps} steps: float32 {np.mean(plain):.4f}, low from step {args.low_from}"
        f" {np.mean(low_losses):.4f}; seeds spread over {max(plain) - min(plain):.4f}, the largest difference for a"
        f" seed is {max(differences, key=abs):+.4f}"
    )


def main() -> None:
    """Parses the arguments and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overhead", action="store_true", help="what a step without pressure costs")
    parser.add_argument("--fits", action="store_true", help="validation losses")
    parser.add_argument("--steps", type=int, help="steps that are timed, or of a fit (defaults: 40; 1500; 150)")
    parser.add_argument("--budget", type=float, default=0.4, help="of checkpointing, part of what all low units save")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=10, help="fits of each contender (default: 10)")
    parser.add_argument("--step-ms", type=float, default=5.0, help="what a step takes (default: 5)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--low-from", type=int, default=20, help="step of the pressure (default: 20)")
    parser.add_argument("--val-batches", type=int, default=100)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--products", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        return fit_overhead(args.contender, args.steps, args.products)
    if args.overhead:
        return compare_overhead(args.rounds, args.steps or 1500, args.step_ms)
    args.steps = args.steps or (150 if args.fits else 40)
    return compare_fits(args) if args.fits else run_bytes(args)


if __name__ == "__main__":
    main()
