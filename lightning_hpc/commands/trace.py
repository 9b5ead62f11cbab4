"""``lightning-hpc trace``: merges the trace files of all ranks into one that Perfetto and Chrome open."""

import gzip
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt

from lightning_hpc.report.whole_file import whole_file
from lightning_hpc.trace.chrome_trace import chrome_trace
from lightning_hpc.trace.reader import Trace, read_trace, trace_files
from lightning_hpc.trace.records import Record

_MERGE = (
    "Writes one file in Chrome's trace format, with one process row a rank and all ranks on one time axis. Open it at"
    " https://ui.perfetto.dev or in chrome://tracing. Example: lightning-hpc trace merge"
    " lightning_logs/version_0/step_trace --output trace.json.gz"
)
_SUFFIXES = (".json", ".json.gz")


def main(args: Sequence[str] | None = None) -> None:
    """Runs ``trace merge`` with the arguments after ``trace``.

    Raises:
        SystemExit: With status 2, and the way out, for files or arguments that cannot be used.
    """
    parser = ArgumentParser(prog="lightning-hpc trace", description="Works on what StepTrace has recorded.")
    subcommands = parser.add_subcommands(dest="subcommand", required=True)
    merge = _merge_parser()
    subcommands.add_subcommand("merge", merge, help="All ranks of a run in one file for Perfetto.")
    merge.prog = f"{parser.prog} merge"  # as in `bench`
    options = parser.parse_args(args)
    try:
        _merge(options.merge)
    except (OSError, ValueError) as error:
        _refuse(str(error))


class _TraceFiles:
    """The traces of a directory tree, read one by one each time they are gone through, so that one is held at a time.

    Args:
        path: A file, or a directory with ``*.jsonl`` files.

    Attributes:
        headers: Those of the files of the last pass, by path.
    """

    def __init__(self, path: Path) -> None:
        self._paths = trace_files(path)
        self.headers: dict[Path, Record] = {}

    def __iter__(self) -> Iterator[Trace]:
        for path in self._paths:
            trace = read_trace(path)
            self.headers[path] = trace.header
            yield trace


def _merge_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="lightning-hpc trace merge", description=_MERGE)
    parser.add_argument("run", metavar="RUN", help="the directory that StepTrace has written to")
    parser.add_argument(
        "--output", required=True, metavar="FILE.json[.gz]", help="the file to write; with .gz it is compressed"
    )
    parser.add_argument(
        "--attempt", type=NonNegativeInt | None, default=None, metavar="N", help="which attempt, if not the last one"
    )
    return parser


def _merge(options: Namespace) -> None:
    output = Path(options.output)
    _check_output(output)
    files = _TraceFiles(Path(options.run))
    # Reads all files once, so that most of what may be wrong with them is known before anything is written.
    pieces = chrome_trace(files, options.attempt)
    attempt = (
        max(header["attempt"] for header in files.headers.values()) if options.attempt is None else options.attempt
    )
    headers = [header for header in files.headers.values() if header["attempt"] == attempt]
    for warning in _warnings(headers):
        print(f"warning: {warning}", file=sys.stderr)  # noqa: T201 (a command's output)
    _write(pieces, output)
    size = output.stat().st_size / 1e6
    print(f"wrote {output}: attempt {attempt}, ranks: {len(headers)}, {size:.1f} MB")  # noqa: T201 (a command's output)


def _check_output(output: Path) -> None:
    if not output.name.endswith(_SUFFIXES):
        raise ValueError(f"--output {output}: its name must end with one of {', '.join(_SUFFIXES)}")
    if not output.parent.is_dir() or output.is_dir():
        raise ValueError(f"--output {output}: {output.parent} must be a folder, and it a file in it")


def _warnings(headers: Sequence[Record]) -> Iterator[str]:
    world_size = max(header["world_size"] for header in headers)
    if len(headers) < world_size:
        yield f"only {len(headers)} of {world_size} ranks left a trace"
    if len({header["host"] for header in headers}) > 1 and any(header["clock_offset_ms"] is None for header in headers):
        yield "the hosts' clocks were not compared, so their ranks may be drawn too early or too late"


def _write(pieces: Iterator[str], output: Path) -> None:
    with whole_file(output) as file:
        if output.suffix == ".gz":
            with gzip.open(file, "wt", compresslevel=6, encoding="ascii") as compressed:
                compressed.writelines(pieces)
        else:
            file.writelines(piece.encode("ascii") for piece in pieces)


def _refuse(message: str) -> NoReturn:
    """Status 2, as for arguments that cannot be parsed."""
    print(f"lightning-hpc trace merge: {message}", file=sys.stderr)  # noqa: T201 (a command's output)
    sys.exit(2)
