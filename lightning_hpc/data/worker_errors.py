"""Exceptions on their way from a worker to the trainer's process."""

import os
import pickle
import traceback

from lightning_hpc.data.messages import MAX_MESSAGE

_MAX_TRACE = MAX_MESSAGE // 8  # characters, of up to four bytes each


def encode_error(error: Exception, worker: int) -> bytes:
    """The type of the exception that is being handled, if it can be had on the other side, and its traceback."""
    trace = traceback.format_exc()[-_MAX_TRACE:]
    text = f"Caught {type(error).__name__} in worker process {worker} (pid {os.getpid()}).\n{trace}"
    try:
        return pickle.dumps((type(error), text))
    except Exception:
        return pickle.dumps((RuntimeError, text))


def raise_error(body: bytes | memoryview) -> None:
    """Raises in the trainer's process what was raised in a worker.

    A type that cannot be made from a text (pytorch#34130, #140911) becomes a RuntimeError with that text.
    """
    try:
        kind, text = pickle.loads(body)  # noqa: S301 (from a worker of ours)
    except Exception as error:
        raise RuntimeError(f"a worker raised an exception that cannot be unpickled here: {error}") from error
    try:
        raised = kind(_Lines(text) if issubclass(kind, KeyError) else text)
    except Exception:
        raised = RuntimeError(text)
    raise raised


class _Lines(str):
    """A text that a KeyError shows as it is, not on one line."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
