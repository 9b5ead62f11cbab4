"""Every way of reducing gradients at several link rates, on an emulated cluster, against `ddp` and the cost model.

python benchmarks/comm_sweep.py --rate-mbit 50 200 1000 0 --output sweep.json sweep.svg

Trains the example's language model; all strategies take turns in the same processes. Prints for each rate the ratio of
the median step times with its spread over rounds, what a node's rank sends, what the cost model had predicted, and how
far `auto` is from the best fixed choice. Needs root, as the cluster does.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.cluster import Cluster, ClusterRunError
from lightning_hpc.commands.comm_result import CommResult, summarize
from lightning_hpc.commands.timed_fit import TimedFit
from lightning_hpc.report import LineChart
from lightning_hpc.strategies.arguments import AUTO_CODECS

WORKER = Path(__file__).parent / "task" / "fit_language_model.py"
STRATEGIES = ("ddp", "hpc", *(f"hpc:{name}" for name in ("int8", "int4", "bf16", "lowrank", "topk", "bitmask", "auto")))
FORMAT = "lightning_hpc.comm_sweep/1"


@dataclass(frozen=True)
class RateResult:
    """All strategies at one link rate.

    Attributes:
        rate_mbit: Rate of each node's link in Mbit/s; 0 is unshaped.
        results: The strategies, by the names that the cost model uses: ``"none"`` is ``hpc``.
        decisions: What ``auto`` decided in each round, with all that was predicted and measured for it.
    """

    rate_mbit: float
    results: list[CommResult]
    decisions: list[dict[str, Any]]

    @property
    def auto_against_best(self) -> tuple[str, float] | None:
        """The fastest of the fixed choices that `auto` may make, and how many times faster it is than that."""
        auto = next((result for result in self.results if result.strategy == "auto"), None)
        fixed = [result for result in self.results if result.strategy in ("ddp", "none", *AUTO_CODECS)]
        if auto is None or not fixed:
            return None
        best = min(fixed, key=lambda result: result.step_seconds)
        return best.strategy, best.step_seconds / auto.step_seconds


def measure(cluster: Cluster, rate_mbit: float, world_size: int, arguments: argparse.Namespace) -> RateResult:
    """Runs the worker on the cluster."""
    command = [sys.executable, str(WORKER), "--strategies", *arguments.strategies]
    for option in ("steps", "rounds", "context", "batch_size"):
        command += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
    output = cluster.run(command, timeout_s=arguments.timeout_s).outputs[0]
    found = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    fits = {choice(name): [[TimedFit(**one)] for one in rounds] for name, rounds in found.items()}
    decisions = [decision for (fit,) in fits.get("auto", []) for decision in fit.decisions]
    return RateResult(rate_mbit, summarize(fits, world_size), decisions)


def choice(strategy: str) -> str:
    """``"hpc:int8"`` as the cost model calls it: ``"int8"``; ``"hpc"`` is ``"none"``."""
    name, _, compression = strategy.partition(":")
    return (compression or "none") if name == "hpc" else strategy


def show(found: RateResult) -> None:
    """Prints one rate's lines of the table, and what `auto` is worth."""
    for result in found.results:
        low, high = result.speedup_range or (1.0, 1.0)
        sent = sum(result.sent_bytes.values()) / 1e6
        predicted, error = "-", "-"
        if result.predicted_seconds is not None and result.prediction_error is not None:
            predicted, error = f"{result.predicted_seconds:.3f}s", f"{100 * result.prediction_error:+.0f} %"
        name = f"{result.strategy} ({', '.join(result.choice)})" if result.choice else result.strategy
        print(
            f"{rate_name(found.rate_mbit):>12}  {name:<16}  {result.step_seconds:7.3f}s  {result.speedup or 0:5.2f}"
            f" ({low:.2f} to {high:.2f})  {sent:7.2f} MB  {predicted:>9}  {error:>6}",
            flush=True,
        )
    if found.auto_against_best is not None:
        print("{:>12}  auto against the best fixed choice, {}: {:.2f}".format("", *found.auto_against_best), flush=True)


def rate_name(rate_mbit: float) -> str:
    """``"200 Mbit/s"``, or ``"unshaped"``."""
    return f"{rate_mbit:g} Mbit/s" if rate_mbit else "unshaped"


def to_json(found: list[RateResult], arguments: argparse.Namespace) -> str:
    """All results with the settings that they were measured with."""
    content = {
        "format": FORMAT,
        "settings": {name: value for name, value in vars(arguments).items() if name != "output"},
        "rates": [{**asdict(one), "auto_against_best": one.auto_against_best} for one in found],
    }
    return json.dumps(content, indent=2) + "\n"


def to_svg(found: list[RateResult]) -> str:
    """Speed-up over the rate, one line a strategy."""
    names = dict.fromkeys(result.strategy for one in found for result in one.results)
    speedups = [{result.strategy: result.speedup for result in one.results} for one in found]
    return LineChart(
        title="Speed-up over ddp on an emulated cluster",
        x_label="rate of each node's link",
        y_label="median step of ddp / median step (logarithmic)",
        places=[rate_name(one.rate_mbit) for one in found],
        series={name: [speedup.get(name) for speedup in speedups] for name in names},
    ).draw()


def main() -> int:
    """Measures every rate; returns 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rates = [50.0, 200.0, 1000.0, 0.0]
    parser.add_argument(
        "--rate-mbit", type=float, nargs="+", default=rates, help="link rates; 0 is unshaped (default: 50 200 1000 0)"
    )
    parser.add_argument("--nodes", type=int, default=2, help="emulated nodes (default: %(default)s)")
    parser.add_argument("--ranks-per-node", type=int, default=2, help="ranks on each (default: %(default)s)")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), help="what to compare (default: all)")
    parser.add_argument("--steps", type=int, default=12, help="timed steps a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each strategy (default: %(default)s)")
    parser.add_argument("--context", type=int, default=64, help="bytes a sample (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=2, help="samples a step and rank (default: %(default)s)")
    parser.add_argument("--timeout-s", type=float, default=1800, help="for one rate, in seconds (default: %(default)s)")
    parser.add_argument("--output", type=Path, nargs="+", default=[], help="*.json and *.svg to write")
    arguments = parser.parse_args()
    unknown = [str(path) for path in arguments.output if path.suffix not in (".json", ".svg")]
    if unknown:
        parser.error(f"--output {unknown[0]}: its name must end with .json or .svg")

    found: list[RateResult] = []
    failed = False
    header = f"{'link':>12}  {'strategy':<16}  {'step':>8}  over ddp (rounds)     rank 0 sends  predicted   error"
    print(header)
    with Cluster(nodes=arguments.nodes, ranks_per_node=arguments.ranks_per_node, rate_mbit=None) as cluster:
        for rate in arguments.rate_mbit:
            cluster.set_rate(rate or None)
            try:
                found.append(measure(cluster, rate, arguments.nodes * arguments.ranks_per_node, arguments))
            except ClusterRunError as error:
                failed = True
                print(f"{rate_name(rate)}: {error}", file=sys.stderr)
                continue
            show(found[-1])
            write(found, arguments)  # after each rate: a later one may fail
    return int(failed)


def write(found: list[RateResult], arguments: argparse.Namespace) -> None:
    """Writes the files of ``--output``."""
    for path in arguments.output:
        path.write_text(to_json(found, arguments) if path.suffix == ".json" else to_svg(found), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
