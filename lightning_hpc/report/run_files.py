"""Writes a run's report."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_hpc.report.run_page import run_page
from lightning_hpc.report.run_report import RunReport, report_of
from lightning_hpc.report.whole_file import write_whole
from lightning_hpc.trace.reader import Trace

# Directories that say nothing about the run in them.
_PLAIN_NAMES = ("step_trace", "lightning_logs")


def write_report(
    traces: Sequence[Trace], directory: Path, run: Path, metrics: Mapping[str, float] | None = None
) -> tuple[RunReport, Path]:
    """Writes ``report.json`` and ``report.html``, which only their owner may read, as the traces.

    Args:
        traces: Of one run.
        directory: Where to; made where it does not exist.
        run: Absolute path of the run, which names it.
        metrics: Last values of what the module logged.

    Returns:
        The report, and the path of the page.

    Raises:
        ValueError: As `report_of`.
        OSError: If a file cannot be written.
    """
    report = report_of(traces, metrics)
    directory.mkdir(parents=True, exist_ok=True)
    page = directory / "report.html"
    write_whole(page.with_suffix(".json"), report.to_json(), is_private=True)
    write_whole(page, run_page(report, _name_of(run)), is_private=True)
    return report, page


def _name_of(run: Path) -> str:
    parts = [part for part in run.parts[1:] if part not in _PLAIN_NAMES and not part.startswith("attempt_")]
    return "/".join(parts[-2:]) or run.name
