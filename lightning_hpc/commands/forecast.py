"""What the cost model says of the same training on several numbers of nodes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_hpc.comm.cost_model import CodecCost, Prediction, Workload, predict, predict_ddp, scale_nodes
from lightning_hpc.comm.topology import Topology
from lightning_hpc.strategies.arguments import AUTO_CODECS, choose_bucket_mib

_DDP_BUCKET_MIB = 25.0  # DistributedDataParallel's own default
_CANDIDATES = ("ddp", "none", *AUTO_CODECS)
_TIE = 0.02  # closer than that, what loses less is the better one, as for compression="auto"


@dataclass(frozen=True)
class Job:
    """One step on one rank, and how its gradients are cut.

    Attributes:
        parameters: Number of gradients, in fp32.
        forward_seconds: Of the forward pass, with all that comes before the first gradient.
        backward_seconds: Of the backward pass, without communication.
        optimizer_seconds: From the last reduced gradient to the end of the step.
        bucket_mib: Size of a bucket, or None for each strategy's default.
        slice_mib: Size of a slice of the hierarchy.
    """

    parameters: int
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    bucket_mib: float | None = None
    slice_mib: float = 4.0

    @property
    def ddp_bucket_mib(self) -> float:
        """Size of plain DDP's buckets."""
        return self.bucket_mib or _DDP_BUCKET_MIB

    @property
    def hpc_bucket_mib(self) -> float:
        """Size of the hierarchy's buckets."""
        return self.bucket_mib or choose_bucket_mib(4 * self.parameters)

    def workload(self, bucket_mib: float) -> Workload:
        """The computation with buckets of that size."""
        return Workload.uniform(
            numel=self.parameters,
            forward_seconds=self.forward_seconds,
            backward_seconds=self.backward_seconds,
            tail_seconds=self.optimizer_seconds,
            bucket_numel=max(round(bucket_mib * 2**18), 1),
        )


@dataclass(frozen=True)
class Outlook:
    """One choice on one number of nodes.

    Attributes:
        nodes: Number of nodes.
        choice: ``"ddp"``, ``"none"`` for the exact hierarchy, or a codec.
        step_seconds: Duration of a step.
        throughput: Samples a second, relative to one node; each rank keeps its batch size.
        efficiency: Throughput divided by the number of nodes.
        exposed_seconds: What of the step waits for communication.
        bytes_per_node: Payload that a node sends to others in a step.
    """

    nodes: int
    choice: str
    step_seconds: float
    throughput: float
    efficiency: float
    exposed_seconds: float
    bytes_per_node: float


def forecast(job: Job, topology: Topology, nodes: Sequence[int], costs: Sequence[CodecCost]) -> list[Outlook]:
    """Every choice on every number of nodes.

    Args:
        job: What is trained.
        topology: Two levels with their speeds; its first node is the model of all.
        nodes: Numbers of nodes.
        costs: Of the codecs.
    """
    alone = predict_ddp(job.workload(job.ddp_bucket_mib), scale_nodes(topology, 1))
    return [
        Outlook(
            nodes=count,
            choice=choice,
            step_seconds=prediction.step_seconds,
            throughput=count * alone.step_seconds / prediction.step_seconds,
            efficiency=alone.step_seconds / prediction.step_seconds,
            exposed_seconds=prediction.exposed_seconds,
            bytes_per_node=prediction.bytes_per_node if count > 1 else 0.0,
        )
        for count in nodes
        for choice, prediction in _predictions(job, scale_nodes(topology, count), costs)
    ]


def best(outlooks: Sequence[Outlook], nodes: int) -> Outlook:
    """What ``compression="auto"`` would choose on so many nodes: of those that are about as fast, the most exact."""
    here = [outlook for outlook in outlooks if outlook.nodes == nodes and outlook.choice in _CANDIDATES]
    limit = (1 + _TIE) * min(outlook.step_seconds for outlook in here)
    return next(outlook for outlook in here if outlook.step_seconds <= limit)


def verdicts(outlooks: Sequence[Outlook]) -> list[str]:
    """A sentence in plain words for each number of nodes beyond one."""
    return [_verdict(outlooks, nodes) for nodes in sorted({outlook.nodes for outlook in outlooks}) if nodes > 1]


def compare(ratio: float) -> str:
    """A ratio of speeds in words: ``"1.7 x faster"``, ``"3.1 x slower"``, ``"equally fast"``."""
    if 1 / 1.005 < ratio < 1.005:
        return "equally fast"
    value, word = (ratio, "faster") if ratio > 1 else (1 / ratio, "slower")
    digits = 0 if value >= 9.95 else 1 if value >= 1.95 else 2
    return f"{value:.{digits}f} x {word}"


def _than(ratio: float) -> str:
    words = compare(ratio)
    return "as fast as" if words == "equally fast" else f"{words} than"


def _predictions(job: Job, topology: Topology, costs: Sequence[CodecCost]) -> Iterator[tuple[str, Prediction]]:
    ddp = predict_ddp(job.workload(job.ddp_bucket_mib), topology)
    yield "ddp", ddp
    for cost in (CodecCost(), *costs):
        if topology.depth == 1:  # where `HPCStrategy` is plain DDP
            yield cost.name, ddp
        else:
            workload = job.workload(job.hpc_bucket_mib)
            yield cost.name, predict(workload, topology, cost, max(round(job.slice_mib * 2**18), 1))


def _verdict(outlooks: Sequence[Outlook], nodes: int) -> str:
    here = {outlook.choice: outlook for outlook in outlooks if outlook.nodes == nodes}
    ddp, exact, winner = here["ddp"], here["none"], best(outlooks, nodes)
    text = f"{nodes} nodes with ddp are {_than(ddp.throughput)} 1 node"
    if winner.choice == "ddp":
        return f"{text}, and nothing that auto may choose is faster."
    if winner.choice != "none":
        text += f"; with hpc's exact sums (none) they are {compare(exact.throughput)}"
    text += f"; with {winner.choice} they are {compare(winner.throughput)}"
    if winner.throughput <= 1.005:
        text += ", so one node is the better choice"
    return f"{text}."
