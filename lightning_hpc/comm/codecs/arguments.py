"""Checks the numbers that a codec is made with, so that a wrong one is found before the first step."""

from collections.abc import Callable
from numbers import Real
from typing import Any


def require_number(name: str, value: Any, allowed: str, is_allowed: Callable[[Any], bool], kind: type = Real) -> None:
    """Checks a number, of Python or NumPy.

    Args:
        name: Of the argument.
        value: Its value.
        allowed: What is allowed, in words.
        is_allowed: The same as a test, which NaN must not pass.
        kind: `numbers.Integral` for an integer.

    Raises:
        TypeError: If it is not of that kind: a string, a truth value, 2.0 for an integer.
        ValueError: If it is another number than what is allowed.
    """
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name}={value!r} must be {allowed}")
    if not is_allowed(value):
        raise ValueError(f"{name}={value!r} must be {allowed}")
