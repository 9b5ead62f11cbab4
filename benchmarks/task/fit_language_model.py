"""Worker of the benchmarks on the example's language model: times its steps under several strategies.

Run on every rank with torchrun's environment. The strategies take turns (A B B A …) in the same processes, so that what
else the machine does meets all of them alike. Rank 0 prints one JSON line: for each strategy a list with one `TimedFit`
a round.
"""

import argparse
import dataclasses
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.language_model import LanguageModel, StandardLibrary
from lightning_hpc.commands.observing_strategy import ObservingStrategy
from lightning_hpc.commands.timed_fit import TimedFit, timed_fit


def make_strategy(name: str) -> str | Strategy:
    """``hpc:<compression>`` is the strategy with that compression; another name is one of Lightning's registry."""
    strategy, _, compression = name.partition(":")
    return ObservingStrategy(compression=compression or "none") if strategy == "hpc" else name


def fit(strategy: str, steps: int, context: int, batch_size: int) -> TimedFit:
    """Trains for some steps and says what they took."""
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    found = timed_fit(
        make_strategy(strategy),
        LanguageModel(context=context),
        StandardLibrary(context=context, batch_size=batch_size),
        steps=steps,
        is_tuned=strategy == "hpc:auto",
        accelerator="cpu",
        devices=local_world_size,
        num_nodes=int(os.environ["WORLD_SIZE"]) // local_world_size,
    )
    for decision in found.decisions:
        print(f"step {decision['step']}: {decision['reason']}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Runs the rounds and prints the result on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategies", nargs="+", required=True, help="ddp, hpc, hpc:<compression>, in their order")
    parser.add_argument("--steps", type=int, required=True, help="timed steps of each fit")
    parser.add_argument("--rounds", type=int, required=True, help="fits of each strategy")
    parser.add_argument("--context", type=int, required=True, help="bytes a sample")
    parser.add_argument("--batch-size", type=int, required=True, help="samples a step and rank")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    fits: dict[str, list[dict[str, Any]]] = {strategy: [] for strategy in arguments.strategies}
    for number in range(arguments.rounds):
        for strategy in arguments.strategies if number % 2 == 0 else reversed(arguments.strategies):
            found = fit(strategy, arguments.steps, arguments.context, arguments.batch_size)
            fits[strategy].append(dataclasses.asdict(found))
            if os.environ["RANK"] == "0":
                print(f"round {number + 1}/{arguments.rounds} {strategy}: done", file=sys.stderr, flush=True)
    if os.environ["RANK"] == "0":
        print(json.dumps(fits), flush=True)


if __name__ == "__main__":
    main()
