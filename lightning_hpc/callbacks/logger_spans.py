"""Makes spans of what a Trainer's loggers do."""

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch.loggers import Logger

from lightning_hpc.trace.timeline import Timeline

# Lightning calls both each time; some write in the one, some in the other.
_METHODS = ("log_metrics", "save")


class LoggerSpans:
    """Announces each ``log_metrics`` and ``save`` of some loggers to a timeline as a span named ``logging``.

    Lightning announces no action for them. They are wrapped on the instances, so a logger's class, and other uses of
    it, stay as they are.

    Args:
        loggers: The Trainer's.
        timeline: Is told when they start and stop, if that happens on the thread that made this object.
    """

    def __init__(self, loggers: Iterable[Logger], timeline: Timeline) -> None:
        self._wrapped: list[tuple[Logger, str, object]] = []
        for logger in loggers:
            for method in _METHODS:
                wrapper = _wrap(getattr(logger, method), timeline)
                logger.__dict__[method] = wrapper
                self._wrapped.append((logger, method, wrapper))

    def close(self) -> None:
        """Takes the wrappers away, unless somebody has wrapped them in turn."""
        for logger, method, wrapper in self._wrapped:
            if logger.__dict__.get(method) is wrapper:
                del logger.__dict__[method]
        self._wrapped.clear()


def _wrap(function: Callable[..., Any], timeline: Timeline) -> Callable[..., Any]:
    thread = threading.get_ident()

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:  # a timeline is one thread's
            return function(*args, **kwargs)
        timeline.start_span("logging")
        try:
            return function(*args, **kwargs)
        finally:
            timeline.stop_span()

    return timed
