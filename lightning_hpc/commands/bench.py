"""``lightning-hpc bench``: predicts what more nodes would bring, or measures what each way of communicating takes."""

import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from lightning_hpc.commands import bench_comm, bench_predict


def main(args: Sequence[str] | None = None) -> None:
    """Runs ``bench predict`` or ``bench comm`` with the arguments after ``bench``.

    Raises:
        SystemExit: With the way out, if the arguments are not as they must be.
    """
    # As for `python script.py`, so that a class_path may name a module of the working directory.
    sys.path.insert(0, str(Path.cwd()))
    parser = ArgumentParser(
        prog="lightning-hpc bench",
        description="Predicts or measures what gradient communication costs: in plain DDP, in the exact hierarchy of"
        " strategy='hpc', and with each codec.",
    )
    subcommands = parser.add_subcommands(dest="subcommand", required=True)
    for name, module in (("predict", bench_predict), ("comm", bench_comm)):
        added = subcommands.add_subcommand(name, module.make_parser(), help=module.SUMMARY)
        added.prog = f"{parser.prog} {name}"  # it would be called "bench [options] comm", and there are no options
    options = parser.parse_args(args)
    if options.subcommand == "predict":
        bench_predict.run(options.predict)
    else:
        bench_comm.run(options.comm)
