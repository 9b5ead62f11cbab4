"""Checks the values of a record, whose keys the reader has checked: somebody may have changed the file."""

from collections.abc import Callable
from typing import Any

from lightning_hpc.trace.records import MEMORY_FIGURES, PHASES, Record

_LARGEST = 10**15
_LARGEST_TIME = 10**12


def problem_of(record: Record, kind: str) -> str | None:
    """What is wrong with a record: a figure that is no number, below zero or too large to be true, or no text.

    Args:
        record: With all keys of its kind.
        kind: ``header``, ``step``, ``span``, ``decision``, ``memory`` or ``event``.

    Returns:
        The key, its value and what it is not; None if all are what they should be.
    """
    for key, (noun, is_one) in _RULES[kind].items():
        value = record[key]
        if not is_one(value):
            return f"{key} is {repr(value)[:40]}, which is no {noun}"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _LARGEST_TIME


def _is_difference(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST_TIME


def _is_figure(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _LARGEST


def _is_shallow(value: Any, levels: int = 20) -> bool:
    """So that whoever copies it does not run out of stack."""
    if not isinstance(value, dict | list):
        return True
    return levels > 0 and all(
        _is_shallow(each, levels - 1) for each in (value.values() if isinstance(value, dict) else value)
    )


def _or_null(is_one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_one(value)


_COUNT = ("count", _is_count)
_TIME = ("time", _is_time)
_DIFFERENCE = ("difference of times", _is_difference)
_FIGURE = ("figure of its kind", _or_null(_is_figure))
_TEXT = ("text", lambda value: isinstance(value, str))
_OBJECT = ("object, or one that is nested too deeply", lambda value: isinstance(value, dict) and _is_shallow(value))

_RULES: dict[str, dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "header": {
        **dict.fromkeys(("rank", "world_size", "attempt"), _COUNT),
        "started_at": _TIME,
        "clock_offset_ms": (_DIFFERENCE[0], _or_null(_is_difference)),
        "clock_uncertainty_ms": _FIGURE,
        **dict.fromkeys(("host", "clock"), _TEXT),
        "versions": _OBJECT,
    },
    "step": {
        **dict.fromkeys(("step", "batch", "epoch", "optimizer_steps"), _COUNT),
        **dict.fromkeys(("start_ms", "total_ms", *(f"{phase}_ms" for phase in PHASES)), _TIME),
        "unattributed_ms": _DIFFERENCE,  # two clocks do not agree
        **dict.fromkeys(("comm_ms", "comm_bytes", "samples"), _FIGURE),
    },
    "span": {"name": _TEXT, **dict.fromkeys(("start_ms", "duration_ms"), _TIME), "epoch": _FIGURE},
    "decision": {
        "step": _COUNT,
        **dict.fromkeys(("choice", "reason"), _TEXT),
        **dict.fromkeys(("predicted_ms", "measured_ms"), _OBJECT),
    },
    "memory": {
        **dict.fromkeys(("step", "epoch", "batch"), _COUNT),
        "at_ms": _TIME,
        **dict.fromkeys(MEMORY_FIGURES, _FIGURE),
    },
    "event": {"name": _TEXT, "step": _COUNT, "at_ms": _TIME, "details": _OBJECT},
}
