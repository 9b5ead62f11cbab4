r"""Probes emulated clusters of random shape again and again: are ranks grouped right, how long does it take?

sudo .venv/bin/python -m benchmarks.micro.probe --minutes 5

Nodes 2 to 4, ranks a node 1 to 4, links of 50, 200 and 1000 Mbit/s, ranks dealt to nodes at random. Bandwidth is
compared to the link's rate over 1.046, the payload that Ethernet, IP and TCP leave of it at an MTU of 1500.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster import Cluster
from lightning_hpc.comm.topology import Topology

WORKER = Path(__file__).with_name("probe_worker.py")
HEADERS = 1.046
RATES_MBIT = (50, 200, 1000)


@dataclass(frozen=True)
class Outcome:
    """One probe.

    Attributes:
        right: Whether it grouped the ranks as they were dealt.
        seconds: What it took.
        bandwidth_error: Of the link between nodes, as a fraction; None where the grouping is wrong.
        rate_mbit: The link's rate.
    """

    right: bool
    seconds: float
    bandwidth_error: float | None
    rate_mbit: float


def probe_cluster(
    cluster: Cluster, counts: Sequence[int], ranks: Sequence[int], rate_mbit: float, arguments: Sequence[str] = ()
) -> list[Outcome]:
    """Runs the worker on every rank of a cluster and judges each probe.

    Args:
        cluster: Its nodes.
        counts: Ranks on each node.
        ranks: The rank of each place, nodes in order.
        rate_mbit: What its links are shaped to from here on.
        arguments: Further ones of the worker.
    """
    cluster.set_rate(rate_mbit)
    command = [sys.executable, str(WORKER), *arguments, "--ranks", *map(str, ranks)]
    outputs = cluster.run(command, timeout_s=120).outputs
    results = [_results(output) for output in outputs]
    for per_rank in zip(*results, strict=True):
        if any(result["domains"] != per_rank[0]["domains"] for result in per_rank):
            raise AssertionError(f"the ranks disagree: {per_rank}")
    return [_judge(result, expected_topology(counts, ranks), rate_mbit) for result in results[0]]


def expected_topology(counts: Sequence[int], ranks: Sequence[int]) -> Topology:
    """The ranks by node, or flat where every node has one."""
    if max(counts) == 1:
        return Topology.flat(len(ranks))
    left = list(ranks)
    nodes = [sorted(left.pop(0) for _ in range(count)) for count in counts]
    return Topology.from_lists(sorted(nodes))


def _results(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def _judge(result: dict[str, Any], expected: Topology, rate_mbit: float) -> Outcome:
    right = Topology.from_lists(result["domains"]) == expected
    if not right:
        print(f"WRONG: {result} instead of {expected}", flush=True)
    payload = rate_mbit * 1e6 / 8 / HEADERS
    error = result["links"][-1]["bytes_per_second"] / payload - 1 if right else None
    return Outcome(right, result["seconds"], error, rate_mbit)


def _summary(outcomes: Sequence[Outcome]) -> str:
    right = sum(outcome.right for outcome in outcomes)
    seconds = sorted(outcome.seconds for outcome in outcomes)
    errors = sorted(abs(error) for error in (outcome.bandwidth_error for outcome in outcomes) if error is not None)
    return (
        f"{right} of {len(outcomes)} grouped right; {statistics.median(seconds):.2f} s (at most {seconds[-1]:.2f} s);"
        f" bandwidth off by {statistics.median(errors):.1%} (at most {errors[-1]:.1%})"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long to go on (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the shapes and orders (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="probes of each job (default: %(default)s)")
    parser.add_argument("--shape", type=int, nargs="+", help="ranks on each node (default: at random)")
    parser.add_argument(
        "--guess", default="right", help="right, apart or together: the hosts that the probe is told of"
    )
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    end = time.monotonic() + 60 * arguments.minutes
    outcomes: list[Outcome] = []
    while time.monotonic() < end:
        counts = arguments.shape or [generator.randint(1, 4) for _ in range(generator.randint(2, 4))]
        ranks = generator.sample(range(sum(counts)), sum(counts))
        with Cluster(nodes=len(counts), ranks_per_node=counts, rate_mbit=None) as cluster:
            for rate_mbit in RATES_MBIT:
                options = ["--repeats", str(arguments.repeats), "--guess", arguments.guess]
                latest = probe_cluster(cluster, counts, ranks, rate_mbit, options)
                outcomes += latest
                print(f"ranks a node {counts}, {rate_mbit} Mbit/s: {_summary(latest)}", flush=True)
    for rate_mbit in RATES_MBIT:
        print(f"{rate_mbit} Mbit/s: {_summary([o for o in outcomes if o.rate_mbit == rate_mbit])}")
    print(f"all: {_summary(outcomes)}")


if __name__ == "__main__":
    main()
