"""A probe's result on the terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_hpc.comm.groups import level_name
from lightning_hpc.comm.link_speed import format_bits_per_second, format_bytes_per_second, format_seconds, three_digits
from lightning_hpc.comm.probe_result import ProbeResult
from lightning_hpc.commands.terminal import terminal

_MOST_COLUMNS = 16


def print_result(result: ProbeResult, console: Console | None = None) -> None:
    """Prints the tree, the speed of each level, the bandwidth of each pair, the GPUs and the warnings.

    Args:
        result: What to print.
        console: Where to; standard output if None.
    """
    console = terminal(console)
    console.print(Text(result.topology.render(result.host_names)))
    if result.links:
        console.print("\nSpeed of the levels, innermost first, of one transfer at a time:")
        console.print(_levels(result))
    if any(value is not None for row in result.bytes_per_second for value in row):
        if result.topology.world_size <= _MOST_COLUMNS:
            console.print("MB/s from the row's rank to the column's; · was not measured:")
            console.print(_matrix(result))
        else:
            console.print(Text(f"Pairs of {result.topology.world_size} ranks: see --output FILE.html"))
    for line in _places(result):
        console.print(Text(line))
    for warning in result.warnings:
        console.print(Text(f"Warning: {warning}", style="bold yellow"))
    if result.seconds:
        console.print(Text(f"Measured in {result.seconds:.1f} s."))


def _levels(result: ProbeResult) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for column in ("level", "payload", "", "latency"):
        table.add_column(column, justify="left" if column == "level" else "right")
    for height, link in enumerate(result.links):
        rate = link.bytes_per_second
        latency = format_seconds(link.latency_seconds)
        table.add_row(level_name(height), format_bytes_per_second(rate), format_bits_per_second(rate), latency)
    return table


def _matrix(result: ProbeResult) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    order = result.topology.ranks
    for name in ("", *order):
        table.add_column(str(name), justify="right", no_wrap=True)
    for sender in order:
        row = [result.bytes_per_second[sender][receiver] for receiver in order]
        table.add_row(str(sender), *("·" if value is None else three_digits(value / 1e6) for value in row))
    return table


def _places(result: ProbeResult) -> list[str]:
    """One line for each rank with a GPU, and one for each network interface in use."""
    lines = []
    for rank, facts in enumerate(result.ranks):
        if facts.hardware.gpu:
            lines.append(f"rank {rank}: {facts.hardware}")
    interfaces = {
        (facts.host, facts.interface, facts.interface_mbit, facts.hardware.numa_nodes): None for facts in result.ranks
    }
    for host, interface, mbit, numa_nodes in interfaces:
        speed = f" (nominally {mbit} Mbit/s)" if mbit else ""
        numa = f", {numa_nodes} NUMA node{'s' if numa_nodes > 1 else ''}" if numa_nodes else ""
        lines.append(f"{host}: interface {interface or 'unknown'}{speed}{numa}")
    return lines
