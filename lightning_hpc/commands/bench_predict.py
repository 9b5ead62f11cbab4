"""``lightning-hpc bench predict``: will several nodes be slower than one?"""

from collections.abc import Sequence
from pathlib import Path

import torch
from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import PositiveInt
from lightning.pytorch import LightningModule

from lightning_hpc.comm.codec_cost import measure_codec
from lightning_hpc.comm.codecs import CODEC_NAMES, make_codec
from lightning_hpc.comm.cost_model import CodecCost
from lightning_hpc.comm.layout import ParameterSpec
from lightning_hpc.comm.link_speed import LinkSpeed, format_seconds
from lightning_hpc.comm.topology import Topology
from lightning_hpc.commands.argument_types import NonNegative, Positive
from lightning_hpc.commands.bench_options import add_class, add_output, count_parameters
from lightning_hpc.commands.forecast import Job, forecast
from lightning_hpc.commands.forecast_view import ForecastView
from lightning_hpc.commands.output_files import check_outputs, refuse, write_outputs

SUMMARY = "predict whether several nodes will be faster than one, before a job is paid for"

_HEADERS = 1.046  # TCP over Ethernet at an MTU of 1500: bytes on the wire for each byte of payload
_NETWORK_LATENCY_US = 50.0
_NODE_MBIT, _NODE_LATENCY_US = 100_000.0, 10.0
_OPTIMIZER_SHARE = 0.05  # of --compute-ms
_MOST_RANKS = 100_000  # more take minutes
_SIDE = 1024  # of the matrices that --parameters stands for


def make_parser() -> ArgumentParser:
    """The arguments of the subcommand."""
    parser = ArgumentParser(
        description="Predicts step time and throughput on several numbers of nodes, for plain DDP, for the exact"
        " hierarchy ('none') and for each codec. Example: lightning-hpc bench predict --ranks-per-node 8 --network-mbit"
        " 10000 --parameters 125e6 --compute-ms 150 --nodes 1 2 4 8"
    )
    _add_cluster(parser)
    _add_model(parser)
    _add_times(parser)
    parser.add_argument(
        "--nodes", type=PositiveInt, nargs="+", default=[1, 2, 4, 8], help="numbers of nodes to compare"
    )
    parser.add_argument(
        "--bucket-mb",
        type=Positive,
        default=None,
        help="MiB of a bucket of gradients; if not given,"
        " 25 for ddp and a fifth of the model, from 2 to 25, for hpc, as the strategies have it",
    )
    parser.add_argument("--slice-mb", type=Positive, default=4.0, help="MiB of a slice of hpc")
    parser.add_argument(
        "--codec-time",
        choices=("measured", "none"),
        default="measured",
        help="time that codecs take: measured on this machine with one thread (on its GPU if there is one), or none"
        " at all, which is the limit for a much faster device",
    )
    add_output(parser, "the predictions with all that they rest on")
    return parser


def run(options: Namespace) -> None:
    """Predicts, prints, and writes the files.

    Raises:
        SystemExit: With the way out, if the arguments contradict each other or something is missing.
    """
    outputs = check_outputs("bench predict", options.output)
    assumptions: list[str] = []
    topology = _topology(options, assumptions)
    forward, backward, optimizer = _times(options, assumptions)
    specs = _specs(options, assumptions)
    job = Job(
        parameters=sum(spec.numel for spec in specs),
        forward_seconds=forward,
        backward_seconds=backward,
        optimizer_seconds=optimizer,
        bucket_mib=options.bucket_mb,
        slice_mib=options.slice_mb,
    )
    costs = _costs(specs, options.codec_time, assumptions)
    outlooks = forecast(job, topology, sorted(set(options.nodes)), costs)
    view = ForecastView(job, topology, costs, assumptions, outlooks)
    view.print()
    write_outputs(outputs, {".json": view.to_json, ".svg": view.to_svg, ".html": view.to_html})


def _add_cluster(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--topology",
        default=None,
        metavar="FILE.json",
        help="a topology saved by lightning-hpc topology --output FILE.json; its first node stands for all",
    )
    parser.add_argument(
        "--ranks-per-node", type=PositiveInt, default=None, help="ranks on each node, without --topology"
    )
    parser.add_argument(
        "--network-mbit",
        type=Positive,
        default=None,
        help="nominal speed of a node's network link in Mbit/s, of which TCP's headers take 4.6 %; replaces that of"
        " --topology",
    )
    parser.add_argument(
        "--network-latency-us",
        type=Positive,
        default=None,
        help=f"µs that a small message takes to another node, one way; {_NETWORK_LATENCY_US:g} if not given",
    )
    parser.add_argument(
        "--node-mbit",
        type=Positive,
        default=None,
        help=f"payload between two ranks of a node in Mbit/s; {_NODE_MBIT:g}, about PCIe 4.0, if not given",
    )
    parser.add_argument(
        "--node-latency-us",
        type=Positive,
        default=None,
        help=f"µs that a small message takes within a node; {_NODE_LATENCY_US:g} if not given",
    )


def _add_model(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--parameters",
        type=Positive,
        default=None,
        help="number of trainable parameters, such as 125e6; instead of --model",
    )
    add_class(
        parser,
        "model",
        LightningModule,
        "class path of a LightningModule, such as my_package.MyModel, whose parameters are counted; its arguments as"
        " --model.NAME VALUE",
    )


def _add_times(parser: ArgumentParser) -> None:
    for phase, what in (
        ("forward", "the forward pass takes, with all before it,"),
        ("backward", "the backward pass takes, without communication,"),
        ("optimizer", "the optimizer takes, with all after it,"),
    ):
        parser.add_argument(
            f"--{phase}-ms",
            type=NonNegative,
            default=None,
            help=f"ms that {what} on one rank; StepTrace's records have it as {phase}_ms",
        )
    parser.add_argument(
        "--compute-ms",
        type=Positive,
        default=None,
        help="ms of a whole step on one rank without communication, instead of the three above: split into forward and"
        f" backward as 1 to 2, with {100 * _OPTIMIZER_SHARE:g} % for the optimizer",
    )


def _topology(options: Namespace, assumptions: list[str]) -> Topology:
    """Two nodes with the speed of both levels."""
    if options.topology is not None:
        ranks, node, network = _from_file(options)
    elif options.ranks_per_node is None or options.network_mbit is None:
        refuse(
            "bench predict",
            "the cluster is not known: give --topology FILE.json (lightning-hpc topology --output FILE.json measures"
            " it) or --ranks-per-node and --network-mbit, for example --ranks-per-node 8 --network-mbit 10000",
        )
    else:
        ranks, node, network = options.ranks_per_node, None, None
    if max(options.nodes) * ranks > _MOST_RANKS:
        refuse(
            "bench predict", f"--nodes {max(options.nodes)} of {ranks} ranks: no more than {_MOST_RANKS} ranks in all"
        )
    network = _network(options, network)
    if ranks > 1 and node is None and options.node_mbit is None:
        assumptions.append(
            f"Ranks of a node are assumed to exchange {_NODE_MBIT:g} Mbit/s; --node-mbit says otherwise."
        )
    node = _node(options, node)
    assumptions.append(f"Cluster: nodes of {ranks} rank{'s' * (ranks > 1)}; network {network}; within a node {node}.")
    return Topology.from_lists([list(range(ranks)), list(range(ranks, 2 * ranks))], [node, network])


def _from_file(options: Namespace) -> tuple[int, LinkSpeed | None, LinkSpeed | None]:
    """Ranks a node, and the speeds within and between nodes where the file has them."""
    path = options.topology
    if options.ranks_per_node is not None:
        refuse(
            "bench predict", f"--ranks-per-node {options.ranks_per_node} contradicts --topology {path}; leave one out"
        )
    if not Path(path).is_file():
        refuse(
            "bench predict",
            f"--topology {path}: there is no such file; lightning-hpc topology --output {path} makes it, or describe"
            " the cluster with --ranks-per-node and --network-mbit",
        )
    try:
        topology = Topology.load(path)
    except ValueError as error:
        refuse("bench predict", f"--topology {path}: {error}")
    if topology.depth > 2:
        refuse(
            "bench predict",
            f"--topology {path} has {topology.depth} levels, and nodes of one network are what can be added or taken"
            " away here; describe a node with --ranks-per-node, --network-mbit and --node-mbit instead",
        )
    ranks = len(topology.nodes[0])
    if not topology.links:
        return ranks, None, None
    return ranks, topology.links[0], topology.links[1] if topology.depth == 2 else None


def _network(options: Namespace, measured: LinkSpeed | None) -> LinkSpeed:
    if measured is None and options.network_mbit is None:
        refuse(
            "bench predict",
            f"--topology {options.topology} has no speed between nodes; give it with --network-mbit, for example"
            " --network-mbit 10000",
        )
    rate = options.network_mbit * 1e6 / 8 / _HEADERS if options.network_mbit is not None else None
    return _link(rate, options.network_latency_us, measured, 0.0, _NETWORK_LATENCY_US)


def _node(options: Namespace, measured: LinkSpeed | None) -> LinkSpeed:
    rate = options.node_mbit * 1e6 / 8 if options.node_mbit is not None else None
    return _link(rate, options.node_latency_us, measured, _NODE_MBIT * 1e6 / 8, _NODE_LATENCY_US)


def _link(
    rate: float | None, latency_us: float | None, measured: LinkSpeed | None, default_rate: float, default_us: float
) -> LinkSpeed:
    """What is given goes before what is measured, and that before the default."""
    base = measured or LinkSpeed(default_us * 1e-6, default_rate or rate or 1.0)
    return LinkSpeed(base.latency_seconds if latency_us is None else latency_us * 1e-6, rate or base.bytes_per_second)


def _times(options: Namespace, assumptions: list[str]) -> tuple[float, float, float]:
    """Seconds of forward, backward and optimizer."""
    parts = [options.forward_ms, options.backward_ms, options.optimizer_ms]
    if options.compute_ms is not None:
        if any(part is not None for part in parts):
            refuse(
                "bench predict",
                "--compute-ms is the sum of --forward-ms, --backward-ms and --optimizer-ms; leave one out",
            )
        optimizer = _OPTIMIZER_SHARE * options.compute_ms
        forward = (options.compute_ms - optimizer) / 3
        parts = [forward, 2 * forward, optimizer]
        assumptions.append(
            f"Of {options.compute_ms:g} ms a step, {forward:.3g} are taken for forward, {2 * forward:.3g} for backward,"
            f" {optimizer:.3g} for the optimizer."
        )
    if parts[0] is None or parts[1] is None:
        refuse(
            "bench predict",
            "the time of a step is not known: give --forward-ms and --backward-ms (and --optimizer-ms), or"
            " --compute-ms. Train some steps on one rank with the callback StepTrace to see them",
        )
    forward, backward, optimizer = (1e-3 * (part or 0.0) for part in parts)
    if forward + backward <= 0:
        refuse("bench predict", "--forward-ms 0 with --backward-ms 0: a step must take some time")
    return forward, backward, optimizer


def _specs(options: Namespace, assumptions: list[str]) -> list[ParameterSpec]:
    if (options.parameters is None) == (options.model is None):
        refuse("bench predict", "give the model's size, either as --parameters 125e6 or as --model my_package.MyModel")
    if options.model is not None:
        specs = count_parameters(options, "bench predict")
        assumptions.append(
            f"{options.model.class_path} has {sum(spec.numel for spec in specs):,} trainable parameters; gradients are"
            " taken to be fp32."
        )
        return specs
    assumptions.append(
        f"{round(options.parameters):,} parameters are taken to be fp32 matrices of {_SIDE} x {_SIDE}, which lowrank"
        " depends on; --model would count the real ones."
    )
    return list(square_matrices(round(options.parameters)))


def square_matrices(numel: int) -> Sequence[ParameterSpec]:
    """Matrices of 1024 x 1024, and smaller ones for the rest, that have ``numel`` elements together."""
    whole, rest = divmod(numel, _SIDE * _SIDE)
    rows, left = divmod(rest, _SIDE)
    specs = [ParameterSpec(f"matrix{index}", _SIDE * _SIDE, _SIDE) for index in range(whole)]
    if rows:
        specs.append(ParameterSpec("rest", rows * _SIDE, rows))
    if left:
        specs.append(ParameterSpec("vector", left, left))
    return specs


def _costs(specs: Sequence[ParameterSpec], time: str, assumptions: list[str]) -> list[CodecCost]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what torchrun gives each rank
    try:
        costs = [measure_codec(make_codec(name), specs, device) for name in CODEC_NAMES]
    finally:
        torch.set_num_threads(threads)
    if time == "none":
        assumptions.append("Codecs are taken to need no time, which is the limit for a very fast device.")
        return [CodecCost(cost.name, cost.scattered_bytes, cost.gathered_bytes, agrees=cost.agrees) for cost in costs]
    slowest = max(costs, key=lambda cost: cost.pack_seconds + cost.unpack_seconds)
    seconds = (slowest.pack_seconds + slowest.unpack_seconds) * sum(spec.numel for spec in specs)
    assumptions.append(
        f"Codecs were timed on this machine ({device.type}): {slowest.name} is the slowest, {format_seconds(seconds)}"
        " for all gradients. Another machine needs another time; --codec-time none leaves it out."
    )
    return costs
