"""What ``lightning-hpc bench data`` has measured, on the terminal and as files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_hpc.comm.link_speed import format_seconds, three_digits
from lightning_hpc.commands.data_result import OWN, PEER, DataResult, Reads, summarize, verdicts
from lightning_hpc.commands.terminal import terminal
from lightning_hpc.report.line_chart import LineChart
from lightning_hpc.report.page import page, paragraphs, table

_FORMAT = "lightning_hpc.bench_data/1"
_COLUMNS = (
    "workers", "loader", "samples/s", "(rounds)", "MB/s", f"over {PEER}", "(rounds)", "waits", "start", "CPU / 1,000",
)  # fmt: skip
_NOTES = (
    "samples/s: median over rounds, with the slowest and the fastest; the consumer reads every byte of each batch.",
    f"over {PEER}: ratio of the medians at as many workers, with the spread over rounds.",
    "waits: share of the time that the consumer waits for the next batch; start: until the first batch comes.",
    "CPU / 1,000: processor time of all processes for 1,000 samples.",
)


@dataclass(frozen=True)
class DataView:
    """Shows what was measured.

    Attributes:
        environment: Versions, processors, what is read, and the settings.
        remarks: What the user should know of the loader, a sentence each.
        reads: The trials.
        errors: What went wrong, by loader and number of workers.
        is_complete: Whether all rounds are done.
    """

    environment: Mapping[str, Any]
    remarks: Sequence[str]
    reads: Reads
    errors: Mapping[tuple[str, int], str]
    is_complete: bool = True

    @property
    def results(self) -> list[DataResult]:
        """What could be measured, by number of workers."""
        return summarize(self.reads)

    def print(self, console: Console | None = None) -> None:
        """Prints the table, what follows from it, and what went wrong.

        Args:
            console: Where to; standard output if None.
        """
        console = terminal(console)
        console.print(Text("\n".join(self._headlines())))
        console.print(self._table())
        for note in _NOTES:
            console.print(Text(note))
        for sentence in self._verdicts():
            console.print(Text(sentence, style="bold"))
        for line in self._failures():
            console.print(Text(line, style="bold yellow"))

    def to_json(self) -> str:
        """All that was measured, with every trial."""
        content = {
            "format": _FORMAT,
            "complete": self.is_complete,
            "environment": self.environment,
            "remarks": list(self.remarks),
            "results": [asdict(result) for result in self.results],
            "verdicts": self._verdicts(),
            "errors": [
                {"loader": loader, "workers": workers, "error": error}
                for (loader, workers), error in self.errors.items()
            ],
            "trials": [
                {"loader": loader, "workers": workers, "rounds": [asdict(trial) for trial in trials]}
                for (loader, workers), trials in self.reads.items()
            ],
        }
        return json.dumps(content, indent=2) + "\n"

    def to_svg(self) -> str:
        """Samples a second over the number of workers, one line a loader."""
        by_key = {(result.loader, result.workers): result.samples_per_second for result in self.results}
        counts = sorted({workers for _, workers in by_key})
        unit, name = (1000, "1,000 samples") if max(by_key.values(), default=0.0) >= 10_000 else (1, "samples")
        lines = {
            loader: [rate / unit if (rate := by_key.get((loader, count))) is not None else None for count in counts]
            for loader in dict.fromkeys(result.loader for result in self.results)
        }
        return LineChart(
            title="Throughput over workers",
            x_label="workers",
            y_label=f"{name} a second",
            places=[str(count) for count in counts],
            series=lines,
            is_log=False,
            note=next(self._headlines()),
        ).draw()

    def to_html(self) -> str:
        """What follows, the chart, the table and the notes."""
        parts = (
            paragraphs(self._headlines()),
            paragraphs(self._verdicts()),
            self.to_svg(),
            table(_COLUMNS, map(_row, self.results)),
            paragraphs(_NOTES),
            paragraphs(self._failures()),
        )
        return page("How many workers?", parts)

    def _headlines(self) -> Iterator[str]:
        facts = self.environment
        batch = f"{facts['batch_samples']:,} samples and {_size(facts['batch_bytes'])} in a batch"
        step = f"; each step takes {facts['step_ms']:g} ms" if facts["step_ms"] else ""
        yield f"{facts['data']}: {facts['dataset']}, {batch}; {facts['processors']} processors{step}"
        yield from self.remarks

    def _verdicts(self) -> list[str]:
        return verdicts(self.results, (self.environment["step_ms"] or 0.0) / 1e3)

    def _failures(self) -> Iterator[str]:
        for (loader, workers), error in self.errors.items():
            yield f"{loader} with num_workers={workers} failed: {error}"

    def _table(self) -> Table:
        shown = Table(box=SIMPLE_HEAD)
        for column in _COLUMNS:
            shown.add_column(column, justify="left" if column == "loader" else "right")
        last = None
        for result in self.results:
            if last not in (None, result.workers) and any(other.loader == OWN for other in self.results):
                shown.add_section()
            shown.add_row(*_row(result))
            last = result.workers
        return shown


def format_rate(value: float) -> str:
    """A number of samples a second as people say it."""
    return f"{value:,.0f}" if value >= 1000 else three_digits(value)


def _row(result: DataResult) -> Sequence[str]:
    return (
        str(result.workers),
        result.loader,
        format_rate(result.samples_per_second),
        "{} to {}".format(*map(format_rate, result.samples_range)),
        three_digits(result.bytes_per_second / 1e6),
        "" if result.ratio is None else f"{result.ratio:.2f} x",
        "" if result.ratio_range is None else "{:.2f} to {:.2f}".format(*result.ratio_range),
        f"{100 * result.wait_share:.0f} %",
        format_seconds(result.start_seconds),
        format_seconds(result.cpu_seconds),
    )


def _size(count: int) -> str:
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{three_digits(count / factor)} {unit}"
    return f"{count} bytes"
