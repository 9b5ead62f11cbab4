"""How much faster `hpc` trains the example's language model than `ddp` on an emulated cluster, and what it sends.

python benchmarks/task/language_model.py --rate-mbit 200 50

Prints the ratio of the median step times with the spread over rounds. Times of one machine mean little by themselves;
both strategies run interleaved in the same processes. Needs root, as the cluster does.
"""

import argparse
import itertools
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.cluster import Cluster

WORKER = Path(__file__).with_name("fit_language_model.py")
PEER = "ddp"


@dataclass(frozen=True)
class Result:
    """Step times of one strategy at one link rate.

    Attributes:
        strategy: Its name.
        rate_mbit: Rate of each node's link, or None if it was not shaped.
        step_seconds: Median over all timed steps.
        round_medians: Median of each round, in seconds.
        speedup: Median step of the peer divided by this one's.
        speedup_range: The smallest and largest ratio of two rounds.
    """

    strategy: str
    rate_mbit: float | None
    step_seconds: float
    round_medians: list[float]
    speedup: float
    speedup_range: tuple[float, float]


def measure(cluster: Cluster, rate_mbit: float | None, arguments: argparse.Namespace) -> list[Result]:
    """Runs the worker on the cluster and compares each strategy with the peer."""
    command = [sys.executable, str(WORKER), "--strategies", *arguments.strategies]
    for option in ("steps", "rounds", "context", "batch_size"):
        command += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
    output = cluster.run(command, timeout_s=arguments.timeout_s).outputs[0]
    fits = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    rounds = {strategy: [one["step_seconds"] for one in found] for strategy, found in fits.items()}
    return [compare(strategy, rate_mbit, rounds) for strategy in rounds]


def compare(strategy: str, rate_mbit: float | None, rounds: dict[str, list[list[float]]]) -> Result:
    """Summarises one strategy's rounds against the peer's."""
    own, peer = ([statistics.median(steps) for steps in rounds[name]] for name in (strategy, PEER))
    all_own, all_peer = (statistics.median(itertools.chain(*rounds[name])) for name in (strategy, PEER))
    return Result(strategy, rate_mbit, all_own, own, all_peer / all_own, (min(peer) / max(own), max(peer) / min(own)))


def main() -> None:
    """Measures every rate and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-mbit", type=float, nargs="+", default=[200.0], help="link rates; 0 is unshaped")
    parser.add_argument("--nodes", type=int, default=2, help="emulated nodes (default: %(default)s)")
    parser.add_argument("--ranks-per-node", type=int, default=2, help="ranks on each (default: %(default)s)")
    parser.add_argument("--strategies", nargs="+", default=["hpc"], help="to compare with ddp (default: hpc)")
    parser.add_argument("--steps", type=int, default=12, help="timed steps a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of each strategy (default: %(default)s)")
    parser.add_argument("--context", type=int, default=64, help="bytes a sample (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=2, help="samples a step and rank (default: %(default)s)")
    parser.add_argument("--timeout-s", type=float, default=900, help="for one rate, in seconds (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="also write the results to this JSON file")
    arguments = parser.parse_args()
    arguments.strategies = [PEER, *arguments.strategies]

    results = []
    print(f"{'link':>12}  {'strategy':<10}  {'step':>8}  speed-up over {PEER} (spread over rounds)")
    with Cluster(nodes=arguments.nodes, ranks_per_node=arguments.ranks_per_node, rate_mbit=None) as cluster:
        for rate in arguments.rate_mbit:
            cluster.set_rate(rate or None)
            for result in measure(cluster, rate or None, arguments):
                link = f"{rate:g} Mbit/s" if rate else "unshaped"
                low, high = result.speedup_range
                print(
                    f"{link:>12}  {result.strategy:<10}  {result.step_seconds:7.3f}s  "
                    f"{result.speedup:.2f} ({low:.2f} to {high:.2f})",
                    flush=True,
                )
                results.append(asdict(result))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
