"""The command `lightning-hpc`: LightningCLI with this package's strategies registered, and commands of our own."""

import importlib
import importlib.util
import sys
from pathlib import Path

COMMANDS = {
    "topology": "Measure how the ranks of a job are connected; print, save and draw it.",
    "bench": "bench predict: will several nodes be faster than one? bench comm: measure training steps with each way of"
    " communicating. bench data: how many workers do your data need?",
    "compare": "Is a run slower than another one, or is that noise? Exit status 1 for a regression.",
    "report": "What was a run like, and what slows it down? A page and a JSON file from its traces.",
    "trace": "trace merge: all ranks of a run in one file for Perfetto.",
}
"""Modules of `lightning_hpc.commands`, and a line for the help."""


def main() -> None:
    """Runs ``lightning-hpc fit|…``, or one of `COMMANDS`; see ``lightning-hpc --help``.

    Raises:
        SystemExit: With the way out, if the extra `cli` is not installed.
    """
    if importlib.util.find_spec("jsonargparse") is None:
        sys.exit("lightning-hpc needs jsonargparse, which is not installed. Run: pip install 'lightning-hpc[cli]'")
    if len(sys.argv) > 1 and sys.argv[1] in COMMANDS:
        importlib.import_module(f"lightning_hpc.commands.{sys.argv[1]}").main(sys.argv[2:])
        return
    from lightning_hpc.commands.training import TrainingCLI

    # As for `python script.py`, so that a class_path may name a module beside the config file.
    sys.path.insert(0, str(Path.cwd()))
    TrainingCLI()
