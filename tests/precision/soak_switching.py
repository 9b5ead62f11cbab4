"""Random pressure on random ranks: ``python -m tests.precision.soak_switching --sequences 10000``."""

import argparse
import sys
from collections import Counter

from tests.precision.random_switching import run_sequence


def main() -> None:
    """Runs; the first sequence in which something does not hold ends it with an error that names the seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of a sequence")
    parser.add_argument("--seed", type=int, default=0, help="of the first sequence")
    args = parser.parse_args()
    reasons: Counter[str] = Counter()
    most = 0
    for index in range(args.sequences):
        switches = run_sequence(args.seed + index, args.steps)
        reasons.update(switch.reason for switch in switches)
        most = max(most, len(switches))
        if sys.stderr.isatty() and index % 100 == 0:
            print(f"\r{index} of {args.sequences}", end="", file=sys.stderr)
    print(f"{args.sequences} sequences held; switches by reason {dict(reasons)}, at most {most} in a sequence")


if __name__ == "__main__":
    main()
