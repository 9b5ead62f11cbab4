"""Hints that tell what an operator of a data pipeline costs and where it may run; operators stay plain callables."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, TypeVar, get_args

Compute = Literal["low", "medium", "high"]
RunsOn = Literal["worker", "device", "any"]
Operator = TypeVar("Operator", bound=Callable[..., Any])

_ATTRIBUTE = "_lightning_hpc_hints"


@dataclass(frozen=True)
class OperatorHints:
    """What is known of an operator before it has been measured.

    Attributes:
        compute: ``"low"``: looks at each byte about once (crop, flip, cast). ``"medium"``: a few operations on each
            (normalise, jitter). ``"high"``: many (decode, resample, blur); takes a millisecond or more of a sample and
            releases the interpreter's lock meanwhile, so that a thread of its own can pay.
        memory: Bytes out divided by bytes in.
        runs_on: ``"worker"``: takes a sample, in a worker process. ``"device"``: takes a batch, on the device.
            ``"any"``: takes either, with the same result for each sample; the placement chooses.
        random: Whether it draws random numbers or changes a state of its own. Such operators run in the order in which
            they were added, in the calling thread, and with ``"any"`` in the worker, where each sample has its own
            seed: what they draw depends on neither threads nor load.

    Raises:
        ValueError: If a value is none of these, or ``memory`` is not finite and above 0.
    """

    compute: Compute = "low"
    memory: float = 1.0
    runs_on: RunsOn = "worker"
    random: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("compute", get_args(Compute)), ("runs_on", get_args(RunsOn)), ("random", (False, True))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, allowed))}")
        if not isinstance(self.memory, (int, float)) or not 0 < self.memory < inf:
            raise ValueError(f"memory={self.memory!r} must be bytes out divided by bytes in, finite and above 0")


def operator(
    *, compute: Compute = "low", memory: float = 1.0, runs_on: RunsOn = "worker", random: bool = False
) -> Callable[[Operator], Operator]:
    """Attaches hints, which `OperatorHints` explains, to a callable and returns the callable itself.

    Above a function as ``@operator(compute="high")``, above a class for all its instances, or round an object, such as
    a module, as ``operator(compute="high")(module)``. Where it is shared with other code or takes no attributes, give
    the hints to `OperatorGraph.add` instead.

    Raises:
        TypeError: If what it is put on cannot be called or takes no attributes.
        ValueError: As `OperatorHints`.
    """
    hints = OperatorHints(compute, memory, runs_on, random)

    def attach(function: Operator) -> Operator:
        if not callable(function):
            raise TypeError(f"an operator must be callable, got {function!r}")
        try:
            setattr(function, _ATTRIBUTE, hints)
        except (AttributeError, TypeError) as error:
            raise TypeError(f"{function!r} takes no attributes; use graph.add(..., hints={hints!r})") from error
        return function

    return attach


def hints_of(function: Callable[..., Any]) -> OperatorHints:
    """The hints that `operator` attached; the defaults of `OperatorHints` without."""
    hints = getattr(function, _ATTRIBUTE, None)  # could be anything where a class answers to every name
    return hints if isinstance(hints, OperatorHints) else OperatorHints()
