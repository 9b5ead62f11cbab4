"""``lightning-hpc bench comm``: measures training steps with each way of reducing gradients, on the ranks of a job."""

import json
import logging
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import PositiveInt
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import LightningDataModule, LightningModule

from lightning_hpc.comm.codecs import CODEC_NAMES
from lightning_hpc.comm.groups import level_name
from lightning_hpc.comm.level_speeds import with_measured_links
from lightning_hpc.comm.probe import ProbeResult, probe
from lightning_hpc.comm.topology import Topology
from lightning_hpc.commands.argument_types import Positive
from lightning_hpc.commands.bench_model import SyntheticModel
from lightning_hpc.commands.bench_options import add_class, add_output, instantiate, usable_processors, versions
from lightning_hpc.commands.comm_result import PEER
from lightning_hpc.commands.comm_view import CommView
from lightning_hpc.commands.launcher import find_launcher, ranks_per_node
from lightning_hpc.commands.observing_strategy import ObservingStrategy
from lightning_hpc.commands.output_files import check_outputs, refuse, write_outputs
from lightning_hpc.commands.ranks import Ranks
from lightning_hpc.commands.timed_fit import TimedFit, timed_fit
from lightning_hpc.report.whole_file import write_whole

SUMMARY = "measure steps with plain DDP, the exact hierarchy, each codec and 'auto', on the ranks of a job"

_STRATEGIES = (PEER, "none", *CODEC_NAMES, "auto")

_LAUNCH = """\
This process was not started by a launcher, so there are no other ranks to communicate with. Start one process a rank:

  torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 -m lightning_hpc bench comm

or, on one machine, let two processes stand for two nodes:

  torchrun --nproc-per-node=2 -m lightning_hpc bench comm --topology '[[0], [1]]'

or emulate a cluster, as root, from a checkout (needs iproute2 and util-linux):

  python benchmarks/cluster.py --nodes 2 --ranks-per-node 2 --rate-mbit 200 -- python -m lightning_hpc bench comm"""


def make_parser() -> ArgumentParser:
    """The arguments of the subcommand."""
    parser = ArgumentParser(
        description="Measures which way of reducing gradients is fastest on your cluster. Trains a model for some steps"
        " with each strategy, in turns (A B B A) and in the same processes, and compares step times, bytes and the cost"
        " model's predictions. Start it as you start training, one process a rank: torchrun --nnodes=2"
        " --nproc-per-node=4 … -m lightning_hpc bench comm"
    )
    parser.add_argument(
        "--strategies",
        nargs="+",
        choices=_STRATEGIES,
        default=list(_STRATEGIES),
        metavar="NAME",
        help=f"what to compare, of {', '.join(_STRATEGIES)}; none is hpc with exact sums, auto lets hpc"
        " choose, and ddp always runs",
    )
    parser.add_argument("--steps", type=PositiveInt, default=20, help="timed steps of each fit, after its warm-up")
    parser.add_argument("--rounds", type=PositiveInt, default=2, help="fits of each strategy; several show the spread")
    parser.add_argument(
        "--topology",
        default="auto",
        help="ranks by node such as '[[0, 1], [2, 3]]', a file saved by lightning-hpc topology --output FILE.json, or"
        " auto, which measures it",
    )
    _add_model(parser)
    parser.add_argument(
        "--accelerator",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to train; auto takes cuda where each rank of a host has a device, else cpu",
    )
    parser.add_argument(
        "--timeout",
        type=Positive,
        default=120.0,
        help="seconds that a rank waits for another one before the strategy counts as failed",
    )
    add_output(parser, "all steps, the environment and the predictions")
    return parser


def run(options: Namespace) -> None:
    """Measures, prints, and writes the files, on rank 0.

    Raises:
        SystemExit: With the way out, if there is no launcher, nothing to compare, or no strategy works.
    """
    outputs = check_outputs("bench comm", options.output)
    declared = _declared(options.topology)
    environment = find_launcher()
    if environment is None:
        sys.exit(_LAUNCH)
    try:
        local_size = ranks_per_node(environment)
    except ValueError as error:
        refuse("bench comm", str(error))
    os.environ.setdefault("MASTER_ADDR", environment.main_address)
    os.environ.setdefault("MASTER_PORT", str(environment.main_port))
    on_cuda = _on_cuda(options.accelerator, environment.local_rank(), local_size)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    with Ranks(environment, "nccl" if on_cuda else "gloo", timedelta(seconds=options.timeout)) as ranks:
        bench = _Bench(options, environment, local_size, on_cuda, ranks)
        bench.probe(declared)
        bench.measure(outputs)
        if ranks.rank == 0:
            bench.finish(outputs)


def _add_model(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--parameters",
        type=Positive,
        default=3.3e6,
        help="parameters of the built-in model, about: blocks of matrices with a transformer's shapes",
    )
    parser.add_argument(
        "--batch-size", type=PositiveInt, default=2, help="samples a step and rank of the built-in model"
    )
    parser.add_argument(
        "--tokens",
        type=PositiveInt,
        default=64,
        help="rows a sample of the built-in model; more of them are more computation, not more traffic",
    )
    add_class(
        parser,
        "model",
        LightningModule,
        "class path of a LightningModule, such as my_package.MyModel, instead of the built-in one; its arguments as"
        " --model.NAME VALUE",
    )
    add_class(
        parser,
        "data",
        LightningDataModule,
        "class path of the LightningDataModule for --model, if that has no train_dataloader of its own; its arguments"
        " as --data.NAME VALUE",
    )


class _Bench:
    """The measurement on one rank."""

    def __init__(
        self, options: Namespace, environment: ClusterEnvironment, local_size: int, on_cuda: bool, ranks: Ranks
    ) -> None:
        self._options, self._ranks, self._environment = options, ranks, environment
        self._on_cuda, self._local_size = on_cuda, local_size
        self._names = list(dict.fromkeys((PEER, *options.strategies)))
        self._rounds: dict[str, list[list[TimedFit]]] = {name: [] for name in self._names}
        self._errors: dict[str, str] = {}
        self._found = ProbeResult(Topology.flat(ranks.size))
        self._cores: dict[str, int] = {}
        if on_cuda:
            torch.cuda.set_device(environment.local_rank())

    def probe(self, declared: Topology | None) -> None:
        """Measures the links of the topology.

        Raises:
            SystemExit: If that fails, the topology is of another job, or it has one domain only.
        """
        self._require_all_ranks(declared)
        self._say("measuring the links between the ranks")
        outcome = self._ranks.call(self._probe)
        if outcome.error is not None:
            self._stop(f"the links could not be measured: {outcome.error}")
        self._cores = dict(outcome.values)
        self._topology = with_measured_links(declared, self._found) if declared is not None else self._found.topology
        if self._topology.depth == 1:
            example = [[rank] for rank in range(self._ranks.size)]
            self._stop(
                f"all {self._ranks.size} ranks are in one domain, where every strategy is plain DDP: there is nothing"
                f" to compare. Start ranks on several nodes, or declare some: --topology '{example}'"
            )

    def measure(self, outputs: Sequence[Path]) -> None:
        """Runs all rounds. What fails once is not tried again."""
        for number in range(self._options.rounds):
            for name in self._names if number % 2 == 0 else reversed(self._names):
                if name not in self._errors:
                    self._measure(name, f"round {number + 1}/{self._options.rounds} {name}")
                    self._save(outputs)

    def finish(self, outputs: Sequence[Path]) -> None:
        """Shows the results.

        Raises:
            SystemExit: If there are none.
        """
        view = self._view(is_complete=True)
        if not view.results:
            lines = "\n".join(f"  {name}: {error}" for name, error in self._errors.items())
            refuse("bench comm", f"no strategy could be measured:\n{lines}")
        view.print()
        write_outputs(outputs, {".json": view.to_json, ".svg": view.to_svg, ".html": view.to_html})

    def _require_all_ranks(self, declared: Topology | None) -> None:
        try:
            if declared is not None:
                declared.require_world_size(self._ranks.size)
        except ValueError as error:
            self._stop(f"--topology: {error}")

    def _measure(self, name: str, title: str) -> None:
        outcome = self._ranks.call(lambda: vars(self._fit(name)))
        if outcome.error is not None:
            self._errors[name] = outcome.error
            self._say(f"{title}: failed: {outcome.error}")
            return
        fits = [TimedFit(**value) for value in outcome.values]
        self._rounds[name].append(fits)
        typical = sorted(fits[0].step_seconds)[len(fits[0].step_seconds) // 2]
        chosen = f" with {fits[0].choice}" if fits[0].choice else ""
        self._say(f"{title}: {typical:.3f} s a step{chosen}")

    def _fit(self, name: str) -> TimedFit:
        model, data = self._make()
        strategy = PEER if name == PEER else ObservingStrategy(topology=self._topology, compression=name)
        return timed_fit(
            strategy,
            model,
            data,
            steps=self._options.steps,
            is_tuned=name == "auto",
            accelerator="cuda" if self._on_cuda else "cpu",
            devices=self._local_size,
            num_nodes=self._ranks.size // self._local_size,
            plugins=[self._environment],
        )

    def _make(self) -> tuple[LightningModule, LightningDataModule | None]:
        options = self._options
        if options.model is None:
            return SyntheticModel(round(options.parameters), options.batch_size, options.tokens), None
        data = instantiate(options, "data", LightningDataModule) if options.data is not None else None
        return instantiate(options, "model", LightningModule), data

    def _probe(self) -> tuple[str, int]:
        self._found = probe()
        return platform.node(), usable_processors()

    def _view(self, is_complete: bool) -> CommView:
        return CommView(self._facts(), self._rounds, self._errors, is_complete)

    def _facts(self) -> dict[str, Any]:
        fits = next((fits for fits in self._rounds.values() if fits), None)
        names = [level_name(height) for height in range(self._topology.depth)]
        links = [f"{name} {link}" for name, link in zip(names, self._topology.links, strict=True)]
        return {
            "world_size": self._ranks.size,
            "ranks_per_node": self._local_size,
            "device": torch.cuda.get_device_name() if self._on_cuda else "cpu",
            "backend": "nccl" if self._on_cuda else "gloo",
            "cores_by_host": self._cores,
            "threads": torch.get_num_threads(),
            **versions(),
            "topology": self._topology.to_json(),
            "links": "; ".join(links),
            "warnings": list(self._found.warnings),
            "model": self._options.model.class_path if self._options.model is not None else SyntheticModel.__name__,
            "parameters": fits[0][0].gradients if fits else 0,
            "steps": self._options.steps,
            "rounds": self._options.rounds,
            "batch_size": self._options.batch_size if self._options.model is None else None,
        }

    def _save(self, outputs: Sequence[Path]) -> None:
        """Writes what there is so far: a later strategy may end the whole job."""
        if self._ranks.rank == 0:
            for path in outputs:
                if path.suffix == ".json":
                    write_whole(path, self._view(is_complete=False).to_json())

    def _say(self, line: str) -> None:
        if self._ranks.rank == 0:
            print(line, file=sys.stderr, flush=True)  # noqa: T201 (a command's output)

    def _stop(self, message: str) -> None:
        # One rank says it.
        sys.exit(f"lightning-hpc bench comm: {message}" if self._ranks.rank == 0 else 1)


def _declared(text: str) -> Topology | None:
    """The topology that was declared, or None if it is to be measured."""
    if text == "auto":
        return None
    try:
        return Topology.from_lists(json.loads(text)) if text.lstrip().startswith("[") else Topology.load(text)
    except (FileNotFoundError, json.JSONDecodeError):
        refuse(
            "bench comm",
            f"--topology {text} is neither auto, nor ranks by node such as '[[0, 1], [2, 3]]', nor a file that"
            " lightning-hpc topology --output FILE.json has saved",
        )
    except (OSError, ValueError) as error:
        refuse("bench comm", f"--topology {text}: {error}")


def _on_cuda(wanted: str, local_rank: int, local_size: int) -> bool:
    if wanted == "cpu":
        return False
    on_cuda = torch.cuda.is_available() and local_rank < torch.cuda.device_count() >= local_size
    if wanted == "cuda" and not on_cuda:
        refuse(
            "bench comm",
            f"--accelerator cuda: {local_size} ranks on this host need as many CUDA devices, and torch sees"
            f" {torch.cuda.device_count()}; use --accelerator cpu, or start fewer ranks",
        )
    return on_cuda
