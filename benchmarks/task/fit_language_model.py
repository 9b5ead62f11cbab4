"""Worker of `language_model.py`: times the steps of the example's language model under several strategies.

Run on every rank with torchrun's environment. The strategies take turns (A B B A …) in the same processes, so that what
else the machine does meets all of them alike. Rank 0 prints one JSON line: seconds of each step, by strategy and round.
"""

import argparse
import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.language_model import LanguageModel, StandardLibrary
from lightning_hpc.strategies import HPCStrategy

WARM_UP_STEPS = 3  # DistributedDataParallel rebuilds its buckets after the first step
TRIAL_STEPS = 30  # of compression="auto", at most


class StepTimer(Callback):
    """Notes when each batch ends."""

    def __init__(self, warm_up_steps: int) -> None:
        self.ends: list[float] = []
        self.warm_up_steps = warm_up_steps

    def on_train_batch_end(self, *args: Any) -> None:
        """Notes the time."""
        self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Duration of each step after the warm-up."""
        return [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)][self.warm_up_steps - 1 :]


def make_strategy(name: str) -> str | HPCStrategy:
    """``hpc:<compression>`` is the strategy with that compression; another name is one of Lightning's registry."""
    strategy, _, compression = name.partition(":")
    return HPCStrategy(compression=compression) if compression else strategy


def fit(strategy: str, steps: int, context: int, batch_size: int) -> list[float]:
    """Trains and returns the seconds of each step after the warm-up."""
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    warm_up_steps = WARM_UP_STEPS + (TRIAL_STEPS if strategy == "hpc:auto" else 0)
    timer = StepTimer(warm_up_steps)
    seed_everything(1, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=local_world_size,
        num_nodes=int(os.environ["WORLD_SIZE"]) // local_world_size,
        strategy=make_strategy(strategy),
        max_steps=steps + warm_up_steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[timer],
    )
    trainer.fit(LanguageModel(context=context), StandardLibrary(context=context, batch_size=batch_size))
    for decision in getattr(getattr(trainer.strategy, "comm_stats", None), "decisions", ()):
        print(f"step {decision.step}: {decision.reason}", file=sys.stderr, flush=True)
    return timer.seconds()


def main() -> None:
    """Runs the rounds and prints the result on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategies", nargs="+", required=True, help="Lightning strategy names, in their order")
    parser.add_argument("--steps", type=int, required=True, help="timed steps of each fit")
    parser.add_argument("--rounds", type=int, required=True, help="fits of each strategy")
    parser.add_argument("--context", type=int, required=True, help="bytes a sample")
    parser.add_argument("--batch-size", type=int, required=True, help="samples a step and rank")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    seconds: dict[str, list[list[float]]] = {strategy: [] for strategy in arguments.strategies}
    for number in range(arguments.rounds):
        for strategy in arguments.strategies if number % 2 == 0 else reversed(arguments.strategies):
            seconds[strategy].append(fit(strategy, arguments.steps, arguments.context, arguments.batch_size))
            if os.environ["RANK"] == "0":
                print(f"round {number + 1}/{arguments.rounds} {strategy}: done", file=sys.stderr, flush=True)
    if os.environ["RANK"] == "0":
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
