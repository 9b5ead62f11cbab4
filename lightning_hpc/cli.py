"""The command `lightning-hpc`: LightningCLI with this package's strategies registered, and commands of our own."""

import importlib
import importlib.util
import sys
from pathlib import Path

import lightning_hpc

COMMANDS = ("topology", "bench")
"""Modules of `lightning_hpc.commands`."""


def main() -> None:
    """Runs ``lightning-hpc fit|validate|test|predict|topology|bench …``; see ``lightning-hpc --help``.

    Raises:
        SystemExit: With the way out, if the extra `cli` is not installed.
    """
    if importlib.util.find_spec("jsonargparse") is None:
        sys.exit("lightning-hpc needs jsonargparse, which is not installed. Run: pip install 'lightning-hpc[cli]'")
    if len(sys.argv) > 1 and sys.argv[1] in COMMANDS:
        importlib.import_module(f"lightning_hpc.commands.{sys.argv[1]}").main(sys.argv[2:])
        return
    from lightning.pytorch.cli import LightningCLI

    # As for `python script.py`, so that a class_path may name a module beside the config file.
    sys.path.insert(0, str(Path.cwd()))
    LightningCLI(
        save_config_kwargs={"overwrite": True},  # else a second run into the same folder is refused
        parser_kwargs={
            "prog": "lightning-hpc",
            "description": "Trains a LightningModule from a YAML file or from arguments, as LightningCLI does; the"
            " strategies hpc, hpc_spawn, … and the classes of lightning_hpc are known by name. Beside the subcommands"
            f" below there are: {', '.join(COMMANDS)} (see lightning-hpc {COMMANDS[0]} --help).",
            "version": lightning_hpc.__version__,
        },
    )
