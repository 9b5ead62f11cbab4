"""The command `lightning-hpc`: LightningCLI with this package's strategies registered."""

import importlib.util
import sys

import lightning_hpc


def main() -> None:
    """Runs ``lightning-hpc fit|validate|test|predict …``; see ``lightning-hpc --help``.

    Raises:
        SystemExit: With the way out, if the extra `cli` is not installed.
    """
    if importlib.util.find_spec("jsonargparse") is None:
        sys.exit("lightning-hpc needs jsonargparse, which is not installed. Run: pip install 'lightning-hpc[cli]'")
    from lightning.pytorch.cli import LightningCLI

    LightningCLI(
        parser_kwargs={
            "prog": "lightning-hpc",
            "description": "Trains a LightningModule from a YAML file or from arguments, as LightningCLI does; the"
            " strategies hpc, hpc_spawn, … and the classes of lightning_hpc are known by name.",
            "version": lightning_hpc.__version__,
        }
    )
