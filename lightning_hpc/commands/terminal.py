"""Where the commands print their tables."""

from rich.console import Console

_PIPE_WIDTH = 1000


def terminal(console: Console | None = None) -> Console:
    """The console that is given, or standard output."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH  # a pipe has no width, and lines are easier to find whole
    return console
