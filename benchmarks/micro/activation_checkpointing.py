"""Saved activations and step time of the example's language model, plain and with blocks checkpointed to fit.

python benchmarks/micro/activation_checkpointing.py
python benchmarks/micro/activation_checkpointing.py --budget 0.3 0.4 0.6 --depth 12 --steps 20
python benchmarks/micro/activation_checkpointing.py --autocast --device cuda

Both models train on the same batches, in turns (A B B A) in one process. Bytes are the peak of what autograd saves,
counted by storage. Times are medians of steps that nobody measures: forward, backward and AdamW. The extra time is that
of pairs, with the quartiles.
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.language_model import LanguageModel, StandardLibrary
from lightning_hpc.memory import CheckpointedBlocks, CheckpointPlan, DryRun, SavedActivations, find_blocks

WARM_UP_STEPS = 2


class Training:
    """A model with its optimizer."""

    def __init__(self, model: LanguageModel, autocast: bool) -> None:
        self.model = model
        self.blocks = CheckpointedBlocks(find_blocks(model).modules)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self._autocast = autocast

    def step(self, batch: Tensor) -> Tensor:
        """Trains on a batch, and returns the loss."""
        self._optimizer.zero_grad()
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=self._autocast):
            loss: Tensor = self.model.training_step(batch, 0)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def alive_anyway(self, batch: Tensor) -> list[Tensor]:
        """What does not count as saved."""
        return [*self.model.parameters(), *self.model.buffers(), batch]

    def saved_bytes(self, batch: Tensor) -> int:
        """Peak of the saved bytes of a step."""
        with SavedActivations(self.alive_anyway(batch)) as saved, self.blocks.watched_by(saved):
            self.step(batch)
        return saved.peak_bytes


def seconds(step: Callable[[Tensor], Tensor], batch: Tensor) -> tuple[float, float]:
    """Time and loss of a step."""
    synchronize(batch.device)
    start = time.perf_counter()
    loss = step(batch)
    synchronize(batch.device)
    return time.perf_counter() - start, float(loss)


def synchronize(device: torch.device) -> None:
    """Waits for a device that computes by itself."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fit(training: Training, batches: list[Tensor], budget: float) -> CheckpointPlan:
    """Checkpoints the blocks that one measured step suggests."""
    for batch in batches[:WARM_UP_STEPS]:
        training.step(batch)
    with DryRun(training.blocks, training.alive_anyway(batches[WARM_UP_STEPS])) as dry_run:
        training.step(batches[WARM_UP_STEPS])
    plan = dry_run.choose(int(budget * dry_run.model().peak_bytes(())))
    training.blocks.checkpoint(plan.blocks)
    return plan


def compare(model: LanguageModel, batches: list[Tensor], budget: float, autocast: bool) -> None:
    """Measures one budget."""
    plain, fitted = (Training(copy.deepcopy(model), autocast) for _ in range(2))
    plain.blocks.checkpoint(())
    for batch in batches[: WARM_UP_STEPS + 1]:
        plain.step(batch)
    plan = fit(fitted, batches, budget)
    plain_bytes, fitted_bytes = (training.saved_bytes(batches[0]) for training in (plain, fitted))
    pairs, is_equal = [], True
    for index, batch in enumerate(batches[WARM_UP_STEPS + 1 :]):
        first, second = (plain, fitted) if index % 2 else (fitted, plain)
        (first_seconds, first_loss), (second_seconds, second_loss) = (
            seconds(each.step, batch) for each in (first, second)
        )
        is_equal &= first_loss == second_loss
        pairs.append((first_seconds, second_seconds) if first is plain else (second_seconds, first_seconds))
    print_row(budget, plan, plain_bytes, fitted_bytes, pairs, is_equal)


def print_row(
    budget: float,
    plan: CheckpointPlan,
    plain_bytes: int,
    fitted_bytes: int,
    pairs: list[tuple[float, float]],
    is_equal: bool,
) -> None:
    """The figures of one budget."""
    assert plan.plain_peak_bytes == plain_bytes
    extra = [fitted / plain - 1 for plain, fitted in pairs]
    low, middle, high = statistics.quantiles(extra, n=4)
    plain_ms, fitted_ms = (1000 * statistics.median(times) for times in zip(*pairs, strict=True))
    print(
        f"{budget:6.2f} {len(plan.blocks):7d} {plain_bytes / 2**20:8.1f} {fitted_bytes / 2**20:8.1f}"
        f" {1 - fitted_bytes / plain_bytes:7.1%} {fitted_bytes / plan.peak_bytes - 1:10.2%}"
        f" {plain_ms:8.1f} {fitted_ms:8.1f} {middle:7.1%} ({low:.1%} to {high:.1%})"
        f" {1000 * plan.extra_seconds:9.1f}  {'bitwise equal' if is_equal else 'DIFFERENT'}"
    )


def main() -> None:
    """Parses the arguments and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, nargs="+", default=[0.4], help="parts of the plain peak")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--autocast", action="store_true", help="bf16")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    data = StandardLibrary(batch_size=args.batch_size)
    data.setup("fit")
    loader = iter(data.train_dataloader())
    batches = [next(loader).to(args.device) for _ in range(args.steps + WARM_UP_STEPS + 1)]
    model = LanguageModel(width=args.width, depth=args.depth).to(args.device)
    model.log = lambda *_, **__: None  # type: ignore[method-assign]  # there is no Trainer
    print(f"{args.device}, {torch.get_num_threads()} threads, batch {args.batch_size} x 128, {dict(model.hparams)}")
    print(
        "budget  blocks      plain   fitted   lower  vs planned    plain   fitted   extra (quartiles)   planned  losses"
    )
    print("        chosen        MiB      MiB                           ms       ms                       ms more")
    for budget in args.budget:
        compare(model, batches, budget, args.autocast)


if __name__ == "__main__":
    main()
