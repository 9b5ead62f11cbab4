"""Whether `SharedMemoryLoader` keeps what it promises, against `DataLoader` in the same process, in turns.

python -m benchmarks.micro.loader_cases
python -m benchmarks.micro.loader_cases --cases wait epoch-gap --rounds 3 --output cases.json

"""

import argparse
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.micro.loader_cases.auto import auto
from benchmarks.micro.loader_cases.figures import PEER, Figure, Size, show, show_header, show_progress, to_json
from benchmarks.micro.loader_cases.gap import epoch_gap
from benchmarks.micro.loader_cases.jpeg import jpeg
from benchmarks.micro.loader_cases.leaks import leaks
from benchmarks.micro.loader_cases.speed import slow_samples, wait
from benchmarks.micro.loader_cases.tail import p99

CASES: dict[str, Callable[[Size], Iterator[Figure]]] = {
    "wait": wait,
    "slow-samples": slow_samples,
    "epoch-gap": epoch_gap,
    "auto": auto,
    "jpeg": jpeg,
    "p99": p99,
    "leaks": leaks,
}


def explain() -> str:
    """The cases, with what each does."""
    texts = ((name, inspect.getdoc(case) or "") for name, case in CASES.items())
    return "\n\n".join(f"{name}: {text}" for name, text in texts)


def main() -> int:
    """Measures, prints a table, and returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro.loader_cases",
        description=f"{__doc__}{explain()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="of each loader (default: %(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the usual batches (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="*.json to write")
    arguments = parser.parse_args()
    try:
        size = Size(arguments.rounds, arguments.scale)
    except ValueError as error:
        parser.error(str(error))

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    figures: list[Figure] = []
    settings = {"cases": arguments.cases, "rounds": size.rounds, "scale": size.scale}
    show_header()
    for name in arguments.cases:
        try:
            for figure in CASES[name](size):
                show(figure)
                figures.append(figure)
        except ModuleNotFoundError as error:
            show_progress(f"{name} is left out: {error}")
        if arguments.output is not None:
            arguments.output.write_text(to_json(figures, settings), encoding="utf-8")  # a later case may fail
    return int(any(figure.holds is False for figure in figures if figure.loader != PEER))


if __name__ == "__main__":
    sys.exit(main())
