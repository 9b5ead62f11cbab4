"""``lightning-hpc bench``: predicts what more nodes would bring, or measures communication, or how fast data come."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from lightning_hpc.commands import bench_comm, bench_data, bench_predict


def main(args: Sequence[str] | None = None) -> None:
    """Runs ``bench predict``, ``bench comm`` or ``bench data`` with the arguments after ``bench``.

    Raises:
        SystemExit: With the way out, if the arguments are not as they must be.
    """
    # As for `python script.py`, so that a class_path may name a module of the working directory.
    sys.path.insert(0, str(Path.cwd()))
    parser = ArgumentParser(
        prog="lightning-hpc bench",
        description="Predicts or measures what gradient communication costs: in plain DDP, in the exact hierarchy of"
        " strategy='hpc', and with each codec. Measures how many workers your data need, and with which loader.",
    )
    subcommands = parser.add_subcommands(dest="subcommand", required=True)
    modules: dict[str, Any] = {"predict": bench_predict, "comm": bench_comm, "data": bench_data}
    for name, module in modules.items():
        added = subcommands.add_subcommand(name, module.make_parser(), help=module.SUMMARY)
        added.prog = f"{parser.prog} {name}"  # it would be called "bench [options] comm", and there are no options
    options = parser.parse_args(args)
    modules[options.subcommand].run(options[options.subcommand])
