"""A forecast on the terminal and as files."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_hpc.comm.cost_model import CodecCost
from lightning_hpc.comm.link_speed import format_seconds, three_digits
from lightning_hpc.comm.topology import Topology
from lightning_hpc.commands.forecast import Job, Outlook, best, verdicts
from lightning_hpc.commands.terminal import terminal
from lightning_hpc.report.line_chart import LineChart
from lightning_hpc.report.page import page, paragraphs, table

_FORMAT = "lightning_hpc.bench_predict/1"
_COLUMNS = ("nodes", "choice", "step", "throughput", "efficiency", "exposed", "a node sends")


@dataclass(frozen=True)
class ForecastView:
    """Shows a forecast.

    Attributes:
        job: What is trained.
        topology: Two levels with their speeds.
        costs: Of the codecs.
        assumptions: What was taken for granted, a sentence each.
        outlooks: The forecast.
    """

    job: Job
    topology: Topology
    costs: Sequence[CodecCost]
    assumptions: Sequence[str]
    outlooks: Sequence[Outlook]

    def print(self, console: Console | None = None) -> None:
        """Prints what was assumed, the table and the verdict.

        Args:
            console: Where to; standard output if None.
        """
        console = terminal(console)
        for sentence in self.assumptions:
            console.print(Text(f"- {sentence}"))
        console.print(self._table())
        console.print("Throughput is relative to 1 node, each rank keeping its batch size. Bold: what auto may choose,")
        console.print("and would; others must be asked for by name.\n")
        for sentence in verdicts(self.outlooks):
            console.print(Text(sentence, style="bold"))

    def to_json(self) -> str:
        """The forecast with all that it rests on."""
        content = {
            "format": _FORMAT,
            "job": asdict(self.job),
            "topology": self.topology.to_json(),
            "codec_costs": [asdict(cost) for cost in self.costs],
            "assumptions": list(self.assumptions),
            "verdicts": verdicts(self.outlooks),
            "predictions": [asdict(outlook) for outlook in self.outlooks],
        }
        return json.dumps(content, indent=2) + "\n"

    def to_svg(self) -> str:
        """Throughput over the number of nodes, one line a choice."""
        counts = list(dict.fromkeys(outlook.nodes for outlook in self.outlooks))
        choices = dict.fromkeys(outlook.choice for outlook in self.outlooks)
        by_key = {(outlook.choice, outlook.nodes): outlook.throughput for outlook in self.outlooks}
        return LineChart(
            title="Predicted throughput, relative to one node",
            x_label="nodes",
            y_label="samples a second, relative to one node with ddp (logarithmic)",
            places=[str(count) for count in counts],
            series={choice: [by_key[choice, count] for count in counts] for choice in choices},
            references={"ideal": counts, "one node": [1.0] * len(counts)},
        ).draw()

    def to_html(self) -> str:
        """The chart, the verdict, the table and the assumptions."""
        rows = (self._row(outlook) for outlook in self._shown())
        parts = (
            paragraphs(verdicts(self.outlooks)),
            self.to_svg(),
            table(_COLUMNS, rows),
            paragraphs(self.assumptions),
        )
        return page("Will more nodes be faster?", parts)

    def _shown(self) -> list[Outlook]:
        """On one node all choices are plain DDP: one line."""
        return [outlook for outlook in self.outlooks if outlook.nodes > 1 or outlook.choice == "ddp"]

    def _table(self) -> Table:
        shown = Table(box=SIMPLE_HEAD)
        for column in _COLUMNS:
            shown.add_column(column, justify="left" if column == "choice" else "right")
        winners = {outlook.nodes: best(self.outlooks, outlook.nodes) for outlook in self.outlooks}
        for index, outlook in enumerate(self._shown()):
            if index and outlook.choice == "ddp":
                shown.add_section()
            style = "bold green" if outlook is winners[outlook.nodes] and outlook.nodes > 1 else None
            style = style or ("red" if outlook.throughput < 1 / 1.005 else None)
            shown.add_row(*self._row(outlook), style=style)
        return shown

    @staticmethod
    def _row(outlook: Outlook) -> tuple[str, ...]:
        return (
            str(outlook.nodes),
            outlook.choice if outlook.nodes > 1 else "any: plain ddp",
            format_seconds(outlook.step_seconds),
            f"{_ratio(outlook.throughput)} x",
            f"{100 * outlook.efficiency:.0f} %",
            format_seconds(outlook.exposed_seconds) if outlook.exposed_seconds > 0 else "0",
            f"{three_digits(outlook.bytes_per_node / 1e6)} MB",
        )


def _ratio(value: float) -> str:
    return three_digits(value) if value >= 0.1 else f"{value:.2g}"
