"""The files that a command writes, by their suffix: ``--output FILE …``."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from lightning_hpc.report.whole_file import write_whole

SUFFIXES = (".json", ".svg", ".html")


def check_outputs(command: str, outputs: Sequence[str]) -> list[Path]:
    """The paths of ``--output``.

    Args:
        command: Name of the command, such as ``"bench comm"``.
        outputs: The paths as they were given.

    Raises:
        SystemExit: If one of them cannot be written.
    """
    paths = [Path(path) for path in outputs]
    for path in paths:
        if path.suffix not in SUFFIXES:
            refuse(command, f"--output {path}: its name must end with one of {', '.join(SUFFIXES)}")
        if not path.parent.is_dir():
            refuse(command, f"--output {path}: there is no folder {path.parent}; make it first, or name another one")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            refuse(command, f"--output {path}: it cannot be written; name another file")
    return paths


def write_outputs(paths: Sequence[Path], writers: Mapping[str, Callable[[], str]]) -> None:
    """Writes each file with the writer of its suffix, and says so."""
    for path in paths:
        write_whole(path, writers[path.suffix]())
        print(f"wrote {path}")  # noqa: T201 (a command's output)


def refuse(command: str, message: str) -> NoReturn:
    """Ends a command with a message."""
    sys.exit(f"lightning-hpc {command}: {message}")
