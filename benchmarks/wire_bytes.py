"""Bytes that cross each node's link in a training step, by the link's own counter, against the lower bound.

python benchmarks/wire_bytes.py --nodes 2 3 4 --ranks-per-node 1 2 4 --uneven 2,1 3,2,1 1,4 --output wire_bytes.json

Trains the example's language model, on bytes drawn at random, on emulated clusters of every shape. The counter
(`tc -s qdisc`, all headers included) is read inside the training, between two barriers after the warm-up and again
after the last step, so that neither start nor end is in the difference. The topology is declared: nothing is probed.

The bound for S bytes of gradient on N nodes is 1.03 h · 2(N-1)/N · S a node, where h = 1.046 is what Ethernet, IP and
TCP add at an MTU of 1500; for int8 0.27 of that, for int4 0.14. The other codecs, and `ddp` for comparison, have none.

The last two columns compare ``comm_stats`` with the counter: by how much the link carried more than the counted payload
times h, and more than the payload itself once 66 bytes of headers are taken from each packet. The first grows where
messages are small, since gloo and TCP add some 400 bytes to each (measured: 4 packets, with 145 bytes of gloo's own);
the second must be within 3 %. The exit status is 1 if a node sends more than its bound, or the two counts disagree.
Needs root, as the cluster does.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.cluster import Cluster, ClusterRunError
from examples.language_model import LanguageModel
from lightning_hpc.comm.stats import CommStats
from lightning_hpc.comm.topology import Topology
from lightning_hpc.commands.timed_fit import ONLY_TRAINING, WARM_UP_STEPS
from lightning_hpc.strategies import HPCStrategy

HEADERS = 1.046  # Ethernet, IP and TCP with time stamps at an MTU of 1500
PACKET_HEADERS = 66  # bytes of each packet, that is
SLACK = 1.03
SHARES = {"none": 1.0, "int8": 0.27, "int4": 0.14}
"""What the bound allows of the exact sums' bytes."""

CODECS = ("ddp", "none", "bf16", "int8", "int4", "int3")
FORMAT = "lightning_hpc.wire_bytes/1"
_CONTEXT = 16


@dataclass(frozen=True)
class RankReport:
    """What one rank saw of a training, for each of the counted steps.

    Attributes:
        codec: Name of the codec, ``"none"`` for exact sums, or ``"ddp"``.
        gradient_bytes: Size of all gradients.
        payload_bytes: What this rank sent to other nodes by ``comm_stats``; None where nobody counts.
        wire_bytes: What its node sent, headers included.
        packets: The same in packets at the MTU; acknowledgements are among them.
    """

    codec: str
    gradient_bytes: int
    payload_bytes: float | None
    wire_bytes: float
    packets: float


@dataclass(frozen=True)
class Result:
    """One codec on one cluster.

    Attributes:
        shape: Ranks on each node.
        codec: Name of the codec, ``"none"`` for exact sums, or ``"ddp"``.
        gradient_bytes: Size of all gradients.
        wire_bytes: Sent by each node in a step, headers included.
        payload_bytes: Sent by each node's ranks to other nodes in a step by ``comm_stats``; None where nobody counts.
        packets: Sent by each node in a step.
    """

    shape: tuple[int, ...]
    codec: str
    gradient_bytes: int
    wire_bytes: tuple[float, ...]
    payload_bytes: tuple[float, ...] | None
    packets: tuple[float, ...]

    @classmethod
    def of(cls, shape: Sequence[int], reports: Sequence[RankReport]) -> "Result":
        """Puts the reports of all ranks together, in their order."""
        nodes = [[reports[rank] for rank in node] for node in ranks_by_node(shape)]
        counted = reports[0].payload_bytes is not None
        return cls(
            shape=tuple(shape),
            codec=reports[0].codec,
            gradient_bytes=reports[0].gradient_bytes,
            wire_bytes=tuple(node[0].wire_bytes for node in nodes),
            payload_bytes=tuple(sum(rank.payload_bytes or 0 for rank in node) for node in nodes) if counted else None,
            packets=tuple(node[0].packets for node in nodes),
        )

    @property
    def exact_bytes(self) -> float:
        """The lower bound of a node's payload in a step without compression."""
        nodes = len(self.shape)
        return 2 * (nodes - 1) / nodes * self.gradient_bytes

    @property
    def bound(self) -> float | None:
        """What a node may send in a step; None for codecs without a bound."""
        share = SHARES.get(self.codec)
        return None if share is None else share * SLACK * HEADERS * self.exact_bytes

    @property
    def over_headers(self) -> float | None:
        """How far the counter is from payload times `HEADERS`, as a fraction, on the node where that is most."""
        return self._furthest([HEADERS * payload for payload in self.payload_bytes or ()], self.wire_bytes)

    @property
    def over_payload(self) -> float | None:
        """How far the counter without its packets' headers is from the payload, in the same way."""
        carried = [wire - PACKET_HEADERS * packets for wire, packets in zip(self.wire_bytes, self.packets, strict=True)]
        return self._furthest(self.payload_bytes or (), carried)

    @property
    def holds(self) -> bool:
        """Whether every node keeps to the bound, if there is one, and both counts agree, where there are two."""
        within = self.bound is None or max(self.wire_bytes) <= self.bound
        return within and abs(self.over_payload or 0.0) <= SLACK - 1

    def _furthest(self, expected: Sequence[float], counted: Sequence[float]) -> float | None:
        if self.payload_bytes is None:
            return None
        return max((there / one - 1 for there, one in zip(counted, expected, strict=True)), key=abs)


class _Counting(Callback):
    """Reads the counters after the warm-up and after the last step.

    Args:
        steps: Counted steps.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._readings: list[tuple[int, int, int]] = []

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step not in (WARM_UP_STEPS, WARM_UP_STEPS + self._steps):
            return
        stats: CommStats | None = getattr(trainer.strategy, "comm_stats", None)
        payload = stats.bytes_sent.get("inter_node", 0) if stats is not None else 0
        # After the first barrier all that the step sent has arrived; the second one holds back the next step's.
        dist.barrier()
        self._readings.append((payload, *read_link(os.environ["GLOO_SOCKET_IFNAME"])))
        dist.barrier()

    def per_step(self) -> tuple[float, float, float]:
        """Payload of this rank, bytes of its node, packets of its node."""
        before, after = self._readings
        payload, sent, packets = ((late - early) / self._steps for early, late in zip(before, after, strict=True))
        return payload, sent, packets


def read_link(device: str) -> tuple[int, int]:
    """Bytes and packets that a device of the node that this process is on has sent so far."""
    show = ["tc", "-s", "-j", "qdisc", "show", "dev", device]
    (queue,) = json.loads(subprocess.run(show, capture_output=True, check=True).stdout)
    return queue["bytes"], queue["packets"]


def ranks_by_node(shape: Sequence[int]) -> list[list[int]]:
    """``[2, 1]`` ranks on the nodes are ``[[0, 1], [2]]``."""
    return [list(range(sum(shape[:node]), sum(shape[: node + 1]))) for node in range(len(shape))]


def train(codec: str, shape: Sequence[int], steps: int) -> RankReport:
    """Trains on this rank and says what was sent. A collective."""
    topology = Topology.from_lists(ranks_by_node(shape))
    strategy: str | Strategy = codec if codec == "ddp" else HPCStrategy(topology=topology, compression=codec)
    counting = _Counting(steps)
    seed_everything(1, verbose=False)
    model = LanguageModel(context=_CONTEXT)
    windows = torch.randint(256, (sum(shape) * (WARM_UP_STEPS + steps), _CONTEXT + 1), dtype=torch.uint8)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=sum(shape),  # one node by its book: it knows none with another number of ranks
        max_steps=WARM_UP_STEPS + steps,
        callbacks=[counting],
        **ONLY_TRAINING,
    )
    trainer.fit(model, DataLoader(TensorDataset(windows), batch_size=1, collate_fn=_take_window))
    payload, sent, packets = counting.per_step()
    return RankReport(
        codec=codec,
        gradient_bytes=sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        payload_bytes=None if codec == "ddp" else payload,
        wire_bytes=sent,
        packets=packets,
    )


def _take_window(batch: list[tuple[Tensor]]) -> Tensor:
    return batch[0][0].unsqueeze(0)


def run_rank(shape: Sequence[int], arguments: argparse.Namespace) -> None:
    """What each rank of a cluster does: one training a codec, one line of JSON for each."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    for codec in arguments.codecs:
        print(json.dumps(asdict(train(codec, shape, arguments.steps))), flush=True)


def measure(shape: Sequence[int], arguments: argparse.Namespace) -> list[Result]:
    """Runs all codecs on a cluster of that shape."""
    command = [sys.executable, str(Path(__file__).resolve()), "--as-rank-of", shape_name(shape)]
    command += ["--steps", str(arguments.steps), "--codecs", *arguments.codecs]
    with Cluster(nodes=len(shape), ranks_per_node=list(shape), rate_mbit=None) as cluster:
        outputs = cluster.run(command, timeout_s=arguments.timeout_s).outputs
    lines = [[line for line in output.splitlines() if line.startswith('{"codec"')] for output in outputs]
    by_rank = [[RankReport(**json.loads(line)) for line in of_rank] for of_rank in lines]
    return [Result.of(shape, reports) for reports in zip(*by_rank, strict=True)]


def shapes(arguments: argparse.Namespace) -> list[tuple[int, ...]]:
    """Ranks on each node of all clusters."""
    even = [(ranks,) * nodes for nodes in arguments.nodes for ranks in arguments.ranks_per_node]
    return [*even, *arguments.uneven]


def shape_name(shape: Sequence[int]) -> str:
    """``"2,1"`` for two ranks on the first node and one on the second."""
    return ",".join(map(str, shape))


def parse_shape(text: str) -> tuple[int, ...]:
    """Reads what `shape_name` writes.

    Raises:
        argparse.ArgumentTypeError: If it is not two or more positive numbers.
    """
    counts = text.split(",")
    if len(counts) < 2 or not all(count.isdecimal() and int(count) for count in counts):
        raise argparse.ArgumentTypeError(f"{text!r} must be the ranks on each of two or more nodes, such as 2,1")
    return tuple(map(int, counts))


def show(result: Result) -> None:
    """Prints a line of the table: the node that sends most, then where the counts are furthest apart."""
    most = max(result.wire_bytes)
    share = f"{most / (HEADERS * result.exact_bytes):8.4f}"
    bound, ratio = "-", "-"
    if result.bound is not None:
        bound, ratio = f"{result.bound / 1e6:.3f} MB", f"{most / result.bound:.3f}"
    over = ["-" if one is None else f"{100 * one:+.2f} %" for one in (result.over_headers, result.over_payload)]
    print(
        f"{shape_name(result.shape):>8}  {result.codec:<5}  {most / 1e6:8.3f} MB  {share}  {bound:>10}  {ratio:>6}"
        f"  {'PASS' if result.holds else 'FAIL':<4}  {over[0]:>9}  {over[1]:>9}",
        flush=True,
    )


def to_json(results: Sequence[Result], arguments: argparse.Namespace) -> str:
    """All results with the settings that they were measured with."""
    derived = ("bound", "holds", "over_headers", "over_payload")
    content = {
        "format": FORMAT,
        "settings": {"steps": arguments.steps, "headers": HEADERS, "slack": SLACK, "shares": SHARES},
        "results": [{**asdict(one), **{name: getattr(one, name) for name in derived}} for one in results],
    }
    return json.dumps(content, indent=2) + "\n"


def parser() -> argparse.ArgumentParser:
    """The command line's."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--nodes", type=int, nargs="*", default=[2, 3, 4], help="emulated nodes (default: 2 3 4)")
    made.add_argument(
        "--ranks-per-node", type=int, nargs="*", default=[1, 2, 4], help="ranks on each of them (default: 1 2 4)"
    )
    made.add_argument(
        "--uneven",
        type=parse_shape,
        nargs="*",
        default=[(2, 1), (3, 2, 1), (1, 4)],
        help="clusters with the ranks on each node (default: 2,1 3,2,1 1,4)",
    )
    made.add_argument(
        "--codecs", nargs="+", choices=CODECS, default=list(CODECS), help="what to compare (default: all)"
    )
    made.add_argument("--steps", type=int, default=5, help="counted steps (default: %(default)s)")
    made.add_argument("--timeout-s", type=float, default=900, help="for one cluster, in seconds (default: %(default)s)")
    made.add_argument("--output", type=Path, help="a JSON file to write")
    made.add_argument("--as-rank-of", type=parse_shape, help=argparse.SUPPRESS)
    return made


def main() -> int:
    """Measures every cluster; returns 1 if a bound is missed or a run fails."""
    command_line = parser()
    arguments = command_line.parse_args()
    if min(arguments.nodes, default=2) < 2:
        command_line.error(f"--nodes {min(arguments.nodes)}: one node sends nothing; give two or more")
    if arguments.as_rank_of is not None:
        run_rank(arguments.as_rank_of, arguments)
        return 0
    results: list[Result] = []
    failed = False
    print(
        f"{'ranks':>8}  {'codec':<5}  {'node sends':>11}  {'of exact':>8}  {'bound':>10}  {'ratio':>6}        "
        f"  {'h·payload':>9}  {'payload':>9}"
    )
    for shape in shapes(arguments):
        try:
            found = measure(shape, arguments)
        except ClusterRunError as error:
            failed = True
            print(f"{shape_name(shape)}: {error}", file=sys.stderr)
            continue
        results += found
        for result in found:
            show(result)
        if arguments.output is not None:  # after each cluster: a later one may fail
            arguments.output.write_text(to_json(results, arguments), encoding="utf-8")
    return int(failed or not all(result.holds for result in results))


if __name__ == "__main__":
    sys.exit(main())
