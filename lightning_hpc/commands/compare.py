"""``lightning-hpc compare``: is a run slower than another, or is that noise? A gate for continuous integration."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from lightning_hpc.commands.argument_types import NonNegative
from lightning_hpc.commands.terminal import terminal
from lightning_hpc.report.baseline import read_baseline, save_baseline
from lightning_hpc.report.comparison import GateSettings, compare_runs
from lightning_hpc.report.comparison_report import COLUMNS, ComparisonReport
from lightning_hpc.report.side import Side, read_side
from lightning_hpc.report.whole_file import write_whole

DEFAULT_SKIP = 20

_T = TypeVar("_T")

_HELP = (
    "Compares the step times of runs that StepTrace has recorded. Exit status: 0 if there is no regression, also where"
    " noise or too few steps leave it open, which is said; 1 for a regression; 2 for files or arguments that cannot be"
    " used. Take several runs of each side, in turns (base, new, base, new, …): that tells a slower program from a"
    " slower moment. Example: lightning-hpc compare runs/main runs/branch --markdown comment.md"
)


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command with the arguments after its name.

    Raises:
        SystemExit: With status 1 for a regression, and 2, with the way out, for bad input.
    """
    options = _parser().parse_args(args)
    if options.save_baseline is not None:
        _save(options)
        return
    if len(options.runs) != 2:
        _refuse(f"it takes BASE and NEW, and was given {len(options.runs)} paths; put several runs below one directory")
    settings = _attempt(lambda: GateSettings(options.threshold / 100, options.confidence))
    _check_outputs([path for path in (options.markdown, options.output) if path not in (None, "-")])
    base, new = _attempt(lambda: _read_sides(options))
    if base.environment["world_size"] != new.environment["world_size"]:
        _refuse(
            f"{base.name} has {base.environment['world_size']} ranks and {new.name}"
            f" {new.environment['world_size']}: their steps do not do the same; compare runs of one number of ranks"
        )
    report = ComparisonReport(compare_runs(base.runs, new.runs, settings), base, new)
    _show(report, options)
    if report.comparison.is_regression:
        sys.exit(1)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="lightning-hpc compare", description=_HELP)
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="PATH",
        help="BASE and NEW: each a directory of StepTrace, one above several of them, whose runs then count as one"
        " side, or a baseline (*.json). With --save-baseline: all runs of the baseline",
    )
    parser.add_argument(
        "--save-baseline",
        default=None,
        metavar="FILE.json",
        help="write the runs to this small file, such as benchmarks/baselines/NAME.json, instead of comparing",
    )
    parser.add_argument(
        "--threshold",
        type=NonNegative,
        default=2.0,
        metavar="PCT",
        help="smallest growth of the step that counts, in percent",
    )
    parser.add_argument(
        "--confidence",
        type=float,
        default=0.99,
        help="of the intervals, from 0.5 to below 1; higher means fewer alarms",
    )
    parser.add_argument(
        "--skip",
        type=NonNegativeInt | None,
        default=None,
        metavar="STEPS",
        help=f"first steps of each run that do not count; if not given, {DEFAULT_SKIP}, or as in the baseline",
    )
    parser.add_argument(
        "--markdown",
        default=None,
        metavar="FILE",
        help="write a table for pull requests; - prints it instead of the other",
    )
    parser.add_argument("--output", default=None, metavar="FILE.json", help="write all figures")
    return parser


def _save(options: Namespace) -> None:
    path = Path(options.save_baseline)
    if path.suffix != ".json":
        _refuse(f"--save-baseline {path}: its name must end with .json")
    if options.markdown is not None or options.output is not None:
        _refuse("--save-baseline compares nothing, so --markdown and --output have nothing to write; leave them out")
    skip = DEFAULT_SKIP if options.skip is None else options.skip
    side = _attempt(lambda: read_side(options.runs, skip))
    for note in side.notes:
        print(f"warning: {note}", file=sys.stderr)  # noqa: T201 (a command's output)
    _attempt(lambda: path.parent.mkdir(parents=True, exist_ok=True))
    _attempt(lambda: save_baseline(path, side, skip))
    print(f"wrote {path}: {len(side.runs)} runs")  # noqa: T201 (a command's output)


def _read_sides(options: Namespace) -> tuple[Side, Side]:
    """Baselines first: the other side leaves out as many steps as they do."""
    baselines = {path: read_baseline(Path(path)) for path in options.runs if Path(path).suffix == ".json"}
    skips = {skip for _, skip in baselines.values()}
    if len(skips) > 1 or (options.skip is not None and skips - {options.skip}):
        raise ValueError(
            f"the baseline leaves out the first {', '.join(map(str, sorted(skips)))} steps; compare without --skip, or"
            " with baselines made alike"
        )
    skip = next(iter(skips), DEFAULT_SKIP if options.skip is None else options.skip)
    base, new = (baselines[path][0] if path in baselines else read_side([path], skip) for path in options.runs)
    return base, new


def _show(report: ComparisonReport, options: Namespace) -> None:
    if options.markdown == "-":
        sys.stdout.write(report.to_markdown())
    else:
        _print(report)
    for path, content in ((options.markdown, report.to_markdown), (options.output, report.to_json)):
        if path not in (None, "-"):
            _attempt(lambda: write_whole(Path(path), content()))  # noqa: B023 (called at once)
            print(f"wrote {path}", file=sys.stderr)  # noqa: T201 (a command's output)


def _print(report: ComparisonReport) -> None:
    console = terminal()
    style = "bold red" if report.comparison.is_regression else "bold"
    console.print(Text(report.headline, style=style))
    shown = Table(box=SIMPLE_HEAD)
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column in ("", "verdict") else "right")
    for row in report.rows:
        shown.add_row(*(Text(cell) for cell in row))
    if report.rows:
        console.print(shown)
    for warning in report.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
    for note in report.notes:
        console.print(Text(note))


def _check_outputs(outputs: Sequence[str]) -> None:
    """Before anything is computed."""
    for path in map(Path, outputs):
        if not path.parent.is_dir() or path.is_dir():
            _refuse(f"{path} cannot be written: {path.parent} must be a folder, and it a file in it")


def _attempt(action: Callable[[], _T]) -> _T:
    try:
        return action()
    except (OSError, ValueError) as error:
        _refuse(str(error))


def _refuse(message: str) -> NoReturn:
    """Status 2, since 1 means a regression."""
    print(f"lightning-hpc compare: {message}", file=sys.stderr)  # noqa: T201 (a command's output)
    sys.exit(2)
