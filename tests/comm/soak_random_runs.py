"""Random runs of the engine by the thousand: ``python -m tests.comm.soak_random_runs --runs 1000``."""

import argparse

from tests.comm.test_random_runs import assert_all_failed, run_many, run_until_it_fails
from tests.helpers import run_ranks

_BATCH = 25  # runs in the same processes


def main() -> None:
    """Runs batches with 2, 3, … ranks by turns, each followed by a run in which one stage fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=10**6)
    parser.add_argument("--max-ranks", type=int, default=6)
    arguments = parser.parse_args()
    end = arguments.first_seed + arguments.runs
    for index, seed in enumerate(range(arguments.first_seed, end, _BATCH)):
        world_size, count = 2 + index % (arguments.max_ranks - 1), min(_BATCH, end - seed)
        print(f"{world_size} ranks, seeds {seed} to {seed + count - 1}", flush=True)
        run_ranks(run_many, world_size, seed, count, timeout=600)
        assert_all_failed(run_ranks(run_until_it_fails, world_size, seed, timeout=120))
    print(f"{arguments.runs} runs, and {-(-arguments.runs // _BATCH)} with a planted error: all as it should be")


if __name__ == "__main__":
    main()
