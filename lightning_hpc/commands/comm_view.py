"""What ``lightning-hpc bench comm`` has measured, on the terminal and as files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_hpc.comm.link_speed import format_seconds, three_digits
from lightning_hpc.commands.comm_result import CommResult, Rounds, summarize
from lightning_hpc.commands.terminal import terminal
from lightning_hpc.report.bar_chart import Bar, BarChart
from lightning_hpc.report.page import page, paragraphs, table

_FORMAT = "lightning_hpc.bench_comm/1"
_COLUMNS = ("strategy", "step", "over ddp", "(rounds)", "a rank sends", "exposed", "predicted", "error")
_NOTES = (
    "step: median over all timed steps; over ddp: ratio of the medians, with the spread over pairs of rounds.",
    "a rank sends: payload a step in the last round, of the rank that sends most; ddp's is the ring's, uncounted.",
    "exposed: share of all timed steps' time that is spent waiting for gradients; ddp does not measure it.",
    "predicted: by the cost model from the fastest strategy's steps, measured link speeds and codec times.",
    "error: predicted / step - 1.",
)


@dataclass(frozen=True)
class CommView:
    """Shows what was measured.

    Attributes:
        environment: Hosts, versions, the topology with its speeds, and what was trained.
        rounds: The fits.
        errors: What went wrong, by strategy.
        is_complete: Whether all rounds are done.
    """

    environment: Mapping[str, Any]
    rounds: Rounds
    errors: Mapping[str, str]
    is_complete: bool = True

    @property
    def results(self) -> list[CommResult]:
        """The strategies that were measured."""
        return summarize(self.rounds, self.environment["world_size"])

    def print(self, console: Console | None = None) -> None:
        """Prints the table and what went wrong.

        Args:
            console: Where to; standard output if None.
        """
        console = terminal(console)
        console.print(Text("\n".join(self._headlines())))
        shown = Table(box=SIMPLE_HEAD)
        for column in _COLUMNS:
            shown.add_column(column, justify="left" if column in ("strategy", "a rank sends") else "right")
        for result in self.results:
            shown.add_row(*_row(result))
        console.print(shown)
        for note in _NOTES:
            console.print(Text(note))
        for name, error in self.errors.items():
            console.print(Text(f"{name} failed: {error}", style="bold yellow"))

    def to_json(self) -> str:
        """All that was measured, with all steps."""
        content = {
            "format": _FORMAT,
            "complete": self.is_complete,
            "environment": self.environment,
            "strategies": [asdict(result) for result in self.results],
            "errors": dict(self.errors),
            "fits": {name: [asdict(ranks[0]) for ranks in fits] for name, fits in self.rounds.items()},
        }
        return json.dumps(content, indent=2) + "\n"

    def to_svg(self) -> str:
        """Speed-up over plain DDP, one bar a strategy."""
        bars = [
            Bar(_name(result), result.speedup, result.speedup_range, f"({format_seconds(result.step_seconds)} a step)")
            for result in self.results
            if result.speedup is not None
        ]
        return BarChart(
            title="Speed-up over ddp",
            x_label="median step of ddp / median step; thin lines: smallest and largest ratio of two rounds",
            bars=bars,
            note=next(iter(self._headlines())),
        ).draw()

    def to_html(self) -> str:
        """The chart, the table and the environment."""
        parts = (
            paragraphs(self._headlines()),
            self.to_svg(),
            table(_COLUMNS, map(_row, self.results)),
            paragraphs(_NOTES),
            paragraphs(f"{name} failed: {error}" for name, error in self.errors.items()),
        )
        return page("Gradient communication, measured", parts)

    def _headlines(self) -> Iterator[str]:
        facts = self.environment
        model = f"{facts['model']}, {facts['parameters']:,} parameters"
        yield f"{facts['world_size']} ranks, {facts['backend']} on {facts['device']}; {model}"
        yield f"ranks by node {json.dumps(facts['topology']['domains'])}; {facts['links']}"


def _row(result: CommResult) -> Sequence[str]:
    spread = "{:.2f} to {:.2f}".format(*result.speedup_range) if result.speedup_range is not None else ""
    sent = ", ".join(f"{level} {three_digits(count / 1e6)} MB" for level, count in result.sent_bytes.items())
    return (
        _name(result),
        format_seconds(result.step_seconds),
        "" if result.speedup is None else f"{result.speedup:.2f} x",
        spread,
        sent,
        "" if result.exposed_share is None else f"{100 * result.exposed_share:.0f} %",
        "" if result.predicted_seconds is None else format_seconds(result.predicted_seconds),
        "" if result.prediction_error is None else f"{100 * result.prediction_error:+.0f} %",
    )


def _name(result: CommResult) -> str:
    return f"{result.strategy} ({', '.join(result.choice)})" if result.choice else result.strategy
