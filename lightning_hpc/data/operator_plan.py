"""The steps of an operator graph, the order in which data of one structure go through them, and what runs at once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_hpc.data.operators import OperatorHints
from lightning_hpc.data.seeding import GeneratorStates


@dataclass(frozen=True, eq=False)
class Step:
    """A node of a graph: `OperatorGraph.add` explains the attributes."""

    function: Callable[..., Any]
    inputs: tuple[str, ...]
    output: str
    when: str | None
    hints: OperatorHints

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of all values that must be there before: inputs and condition."""
        return self.inputs if self.when is None else (*self.inputs, self.when)

    def __str__(self) -> str:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return f"step {self.output!r} = {name}({', '.join(self.inputs)})"


class Plan:
    """The steps that data of one structure goes through, and their levels if some can run at once."""

    def __init__(self, steps: list[Step], threads: int) -> None:
        levels = [_share_out(level) for level in _levels(steps)] if threads > 1 else []
        self.steps, self.levels = steps, levels if any(others for _, others in levels) else []
        self.is_checked = False


def _levels(steps: list[Step]) -> list[list[Step]]:
    """Steps by depth: each needs values of earlier levels only, and random ones keep their order."""
    depth: dict[str, int] = {}
    levels: list[list[Step]] = []
    earliest_random = 0
    for step in steps:
        level = max((depth[name] + 1 for name in step.needs if name in depth), default=0)
        if step.hints.random:
            level = earliest_random = max(level, earliest_random)
        depth[step.output] = level
        levels += [[] for _ in range(level + 1 - len(levels))]
        levels[level].append(step)
    return levels


def _share_out(level: list[Step]) -> tuple[list[Step], list[Step]]:
    """The steps of a level for the calling thread and those for others; the calling one gets a heavy one too."""
    heavy = [step for step in level if step.hints.compute == "high"]
    others = [step for step in heavy if not step.hints.random]
    if others and len(others) == len(heavy):
        others.pop()
    return [step for step in level if step not in others], others


def arguments_of(step: Step, values: dict[str, Any]) -> list[Any] | None:
    """What a step is called with; None if it is skipped."""
    try:
        arguments = [values[name] for name in step.inputs]
        condition = step.when is None or values[step.when]
    except KeyError:  # the plan has checked all names, so a step before was skipped
        return None
    return arguments if condition else None


def run(steps: list[Step], values: dict[str, Any]) -> None:
    """Adds what the steps make, one after the other."""
    for step in steps:
        arguments = arguments_of(step, values)
        if arguments is not None:
            values[step.output] = _apply(step, arguments)


def run_checked(steps: list[Step], values: dict[str, Any]) -> None:
    """As `run`.

    Raises:
        ValueError: If a step that threads may run draws random numbers and does not say so.
    """
    for step in steps:
        before = GeneratorStates()
        run([step], values)
        if step.hints.compute == "high" and not step.hints.random and before.have_changed():
            raise ValueError(f"{step} draws random numbers, which threads would mix up; give it the hint random=True")


def _apply(step: Step, arguments: list[Any]) -> Any:
    try:
        return step.function(*arguments)
    except Exception as error:
        if note := getattr(error, "add_note", None):  # Python 3.11
            note(f"in {step}")
        raise


def apply_in_mode(step: Step, arguments: list[Any], inference: bool, grad: bool) -> Any:
    """What a step makes, in the modes of the calling thread."""
    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        return _apply(step, arguments)
