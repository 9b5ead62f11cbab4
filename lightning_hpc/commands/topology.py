"""``lightning-hpc topology``: measures how the ranks of a job are connected, prints, saves and draws it."""

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser, Namespace

from lightning_hpc.comm.probe import probe
from lightning_hpc.comm.probe_result import ProbeResult
from lightning_hpc.commands.argument_types import NonNegative, Positive
from lightning_hpc.commands.launcher import find_launcher
from lightning_hpc.commands.output_files import check_outputs, refuse
from lightning_hpc.commands.topology_picture import draw_html, draw_svg
from lightning_hpc.commands.topology_text import print_result

_LAUNCH = """\
This process was not started by a launcher, so there are no other ranks to measure. Start one process a rank:

  torchrun --nproc-per-node=2 -m lightning_hpc topology
  torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 -m lightning_hpc topology
  srun --ntasks-per-node=4 lightning-hpc topology

or show a saved topology:

  lightning-hpc topology --load FILE.json"""


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command with the arguments after its name.

    Raises:
        SystemExit: With the way out, if the arguments or the launcher's variables are not as they must be.
    """
    options = _parser().parse_args(args)
    outputs = check_outputs("topology", options.output)
    if options.load is not None:
        result: ProbeResult | None = _load(options.load)
    else:
        result = _probe_as_launched(options)
    if result is None:  # not rank 0
        return
    print_result(result)
    for path in outputs:
        _write(result, path)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="lightning-hpc topology",
        description="Measures latency and bandwidth between the ranks of a job, groups the ranks by them, and prints,"
        " saves and draws the result. Start it as you start training, one process a rank, for example with: torchrun"
        " --nproc-per-node=2 -m lightning_hpc topology",
    )
    parser.add_argument(
        "--output",
        nargs="+",
        default=[],
        metavar="FILE",
        help="files to write: *.json can be loaded again, also by HPCStrategy(topology='FILE.json'); *.svg and *.html"
        " are pictures",
    )
    parser.add_argument(
        "--load", default=None, metavar="FILE.json", help="show or draw this saved topology instead of measuring"
    )
    parser.add_argument(
        "--backend",
        choices=("auto", "gloo", "nccl"),
        default="auto",
        help="what carries the messages; auto takes nccl where each rank of a host has a CUDA device, else gloo",
    )
    parser.add_argument(
        "--seconds",
        type=NonNegative,
        default=2.0,
        help="time after which nothing is measured any more that the grouping can do without",
    )
    parser.add_argument(
        "--timeout",
        type=Positive,
        default=60.0,
        help="seconds after which a rank that does not answer is an error",
    )
    return parser


def _load(path: str) -> ProbeResult:
    if not Path(path).is_file():
        refuse("topology", f"--load {path}: there is no such file; --output FILE.json of a measurement makes one")
    try:
        return ProbeResult.load(path)
    except (OSError, ValueError) as error:
        refuse("topology", f"--load {path}: {error}")


def _probe_as_launched(options: Namespace) -> ProbeResult | None:
    """The result on rank 0, None on the others."""
    environment = find_launcher()
    if environment is None:
        sys.exit(_LAUNCH)
    os.environ.setdefault("MASTER_ADDR", environment.main_address)
    os.environ.setdefault("MASTER_PORT", str(environment.main_port))
    rank, local_rank = environment.global_rank(), environment.local_rank()
    backend = _backend(options.backend, local_rank)
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
    timeout = timedelta(seconds=options.timeout)
    dist.init_process_group(backend, rank=rank, world_size=environment.world_size(), timeout=timeout)
    try:
        result = probe(seconds=options.seconds)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return result if rank == 0 else None


def _backend(wanted: str, local_rank: int) -> str:
    has_device = torch.cuda.is_available() and local_rank < torch.cuda.device_count()
    if wanted == "nccl" and not has_device:
        refuse(
            "topology",
            f"--backend nccl: rank {local_rank} of this host has no CUDA device, of which torch sees"
            f" {torch.cuda.device_count()}; use --backend gloo, or start fewer ranks",
        )
    return "nccl" if has_device and wanted != "gloo" else "gloo"


def _write(result: ProbeResult, path: Path) -> None:
    if path.suffix == ".json":
        result.save(path)
    else:
        draw = draw_svg if path.suffix == ".svg" else draw_html
        path.write_text(draw(result), encoding="utf-8")
    print(f"wrote {path}")  # noqa: T201 (a command's output)
