"""``lightning-hpc report``: what a run was like, as a page and as JSON."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jsonargparse import ArgumentParser, Namespace

from lightning_hpc.report.run_files import write_report
from lightning_hpc.trace.finding import render
from lightning_hpc.trace.reader import read_traces

_HELP = (
    "Reports on a run that StepTrace has recorded: step times, phases, ranks, throughput, memory, communication, and"
    " what slows it down. Writes report.html, one page that needs no network, and report.json. Of several attempts the"
    " last is reported on. Example: lightning-hpc report lightning_logs/version_0/step_trace"
)


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command with the arguments after its name.

    Raises:
        SystemExit: With status 2, and the way out, for files or arguments that cannot be used.
    """
    options = _parser().parse_args(args)
    try:
        _report(options)
    except (OSError, ValueError) as error:
        _refuse(str(error))


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="lightning-hpc report", description=_HELP)
    parser.add_argument("run", metavar="RUN", help="the directory that StepTrace has written to, or one file of it")
    parser.add_argument(
        "--output", default=None, metavar="DIR", help="where to write both files; if not given, beside the traces"
    )
    return parser


def _report(options: Namespace) -> None:
    run = Path(options.run)
    traces = read_traces(run)
    directory = Path(options.output) if options.output is not None else run if run.is_dir() else run.parent
    report, page = write_report(traces, directory, run.absolute())
    print(render(report.diagnosis))  # noqa: T201 (a command's output)
    print(f"wrote {page} and {page.with_suffix('.json')}")  # noqa: T201 (a command's output)


def _refuse(message: str) -> NoReturn:
    """Status 2, as for arguments that cannot be parsed."""
    print(f"lightning-hpc report: {message}", file=sys.stderr)  # noqa: T201 (a command's output)
    sys.exit(2)
