"""The loader's random tests by the thousand: ``python -m tests.data.soak_loader --rounds 100000``."""

import argparse
import time
import warnings

from tests.data.test_batch_stream import hold_at_random, watch_growth
from tests.data.test_loader import compare
from tests.data.test_loader_faults import kill_at_random

_SHARE = 1000  # batches in a row, and what the rarer things are counted in


def main() -> None:
    """For every 1,000 batches whose holders are watched: comparisons with `DataLoader`, and killed workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100_000, help="batches whose holders are watched")
    parser.add_argument("--first-seed", type=int, default=10**6)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    shares, kills, begun = -(-arguments.rounds // _SHARE), 0, time.monotonic()
    for seed in range(arguments.first_seed, arguments.first_seed + shares):
        hold_at_random(_SHARE, seed)
        for each in range(4 * seed, 4 * seed + 4):
            compare(each)
        kills += kill_at_random(1, seed)
        print(f"seed {seed}: {kills} workers killed, {time.monotonic() - begun:.0f} s", flush=True)
    before, after = watch_growth(arguments.rounds // 10)
    print(f"{arguments.rounds} batches watched, {4 * shares} comparisons, {kills} workers killed: all as it should be")
    print(f"Pss {before} KiB after {arguments.rounds // 20} batches, {after} KiB after as many again")


if __name__ == "__main__":
    main()
