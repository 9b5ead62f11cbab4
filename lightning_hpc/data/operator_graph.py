"""`OperatorGraph`: the steps that turn what a dataset reads into what a model takes, by the names of their values."""

import copy
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from difflib import get_close_matches
from statistics import median
from typing import Any

import torch
from torch import nn

from lightning_hpc.data.operator_plan import Plan, Step, apply_in_mode, arguments_of, run, run_checked
from lightning_hpc.data.operators import OperatorHints, hints_of
from lightning_hpc.data.seeding import KeptGenerators


class OperatorGraph:
    """Applies operators to the values of a sample, or of a batch: a dict in, another dict out.

    A step takes values of the data or of steps that were added before, so there are no cycles, and the steps run in the
    order in which they were added::

        graph = OperatorGraph(outputs=("x", "label"))
        image = graph.add(decode, inputs="jpg", output="image")
        graph.add(flip, inputs=image, output="flipped", when="training")
        graph.add(mix, inputs=("flipped", "label"), output="x")
        sample = graph({"jpg": ..., "label": 3, "training": True})

    A step whose condition is false is skipped, and with it every step that takes its value or has it as a condition,
    and so on: their outputs are absent from the result. The samples of one batch must agree on what is absent, as
    `default_collate` goes by the first. A condition is a value as any other; to compute one, add a step that makes it.

    The plan is made at the first call, and again only for data of another structure: where other names that the graph
    knows are present. From then on nothing can be added.

    With ``threads``, operators with ``compute="high"`` that do not depend on each other run at once, from the second
    call on: the first looks whether one draws random numbers unannounced. Results do not depend on the threads.

    It pickles if its operators do, and copies; each process makes its own plan and threads.

    Args:
        outputs: Names in the result, unless they are skipped. By default all: the data, and what every step makes.
        threads: How many may work on one sample, the calling one included. Loaders with a worker for each core have
            none to spare.

    Raises:
        TypeError: If ``outputs`` is a single string.
        ValueError: If ``threads`` is below 1.
    """

    def __init__(self, outputs: Iterable[str] | None = None, *, threads: int = 1) -> None:
        if isinstance(outputs, str):
            raise TypeError(f"outputs={outputs!r} must be names, such as ({outputs!r},)")
        if threads < 1:
            raise ValueError(f"threads={threads!r} must be at least 1, the calling thread")
        self.outputs = None if outputs is None else tuple(outputs)
        self.threads = threads
        self._steps: dict[str, Step] = {}
        self._known = frozenset(self.outputs or ())  # all names that outputs and steps mention
        self._optional: frozenset[str] = frozenset()  # what the part of the graph before this one may skip
        self._constants: dict[str, Any] = {}
        self._plans: dict[frozenset[str], Plan] = {}
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}, "_pool": None}

    @property
    def steps(self) -> tuple[Step, ...]:
        """In the order in which they were added."""
        return tuple(self._steps.values())

    def add(
        self,
        function: Callable[..., Any],
        *,
        inputs: str | Sequence[str],
        output: str,
        when: str | None = None,
        hints: OperatorHints | None = None,
    ) -> str:
        """Adds a step, and returns the name of its output, to be an input of later steps.

        Args:
            function: The operator, called with one argument for each input.
            inputs: Name or names of the values that it takes.
            output: Name of the value that it returns.
            when: Name of a value: the step is skipped where that is false.
            hints: By default those that `operator` attached to the function, or else those of a plain function.

        Raises:
            RuntimeError: If the graph has been called already.
            TypeError: If ``function`` cannot be called, or ``when`` is no name.
            ValueError: If the output is no new name, or a step for the device has a condition.
        """
        if not callable(function):
            raise TypeError(f"step {output!r} needs something to call, got {function!r}")
        if when is not None and not isinstance(when, str):
            raise TypeError(f"when={when!r} must be the name of a value; a condition that is computed is a step itself")
        names = (inputs,) if isinstance(inputs, str) else tuple(inputs)
        step = Step(function, names, output, when, hints_of(function) if hints is None else hints)
        if fault := self._fault(step):
            raise ValueError(fault)
        if self._plans:
            raise RuntimeError(f"{step} comes too late: the graph has been called; add all steps before")
        self._append(step)
        return output

    def _fault(self, step: Step) -> str | None:
        if step.output in self._steps:
            return f"{step} makes what {self._steps[step.output]} makes already; use another name"
        for other in (step, *self.steps):
            if step.output in other.needs:
                return f"{other} takes {step.output!r} before {step} makes it; add that first, or use another name"
        if step.when is not None and step.hints.runs_on == "device":
            return f"{step} has when={step.when!r}, but on a device one call is for many samples; use torch.where in it"
        return None

    def _append(self, step: Step) -> None:
        self._steps[step.output] = step
        self._known |= {*step.needs, step.output}

    def bind(self, **constants: Any) -> "OperatorGraph":
        """The same graph, where steps find these values too, instead of what data have under their names.

        They are in the result only if they are among the outputs.

        Raises:
            ValueError: If a step makes a value of that name.
        """
        if made := sorted(constants.keys() & self._steps.keys()):
            raise ValueError(f"{self._steps[made[0]]} makes {made[0]!r}, which cannot be given a value as well")
        bound = self._part(self.steps, self.outputs, self._optional, self.threads)
        bound._constants = {**self._constants, **constants}
        return bound

    def to(self, device: torch.device) -> "OperatorGraph":
        """The same graph, with copies of its modules on a device."""
        moved = [
            replace(step, function=copy.deepcopy(step.function).to(device))
            if isinstance(step.function, nn.Module)
            else step
            for step in self.steps
        ]
        return self._part(moved, self.outputs, self._optional, self.threads).bind(**self._constants)

    def split(self, last: Collection[str]) -> tuple["OperatorGraph", "OperatorGraph"]:
        """Two graphs that, one after the other, do what this one does.

        Args:
            last: Outputs of the steps of the second graph, which gets one thread: the current stream of a device is a
                thread's own.

        Raises:
            ValueError: If no step makes one of the names, or a step of the first graph takes one of them.
        """
        if unknown := sorted(set(last) - self._steps.keys()):
            raise ValueError(f"no step makes {unknown}; there are {list(self._steps)}")
        first = [step for step in self.steps if step.output not in last]
        skippable = set(self._optional)
        for step in first:
            if set(last).intersection(step.needs):
                raise ValueError(f"{step} takes a value of the second part; put {step.output!r} there too")
            if step.when is not None or skippable.intersection(step.needs):
                skippable.add(step.output)
        second = [step for step in self.steps if step.output in last]
        leaving = self.outputs
        if leaving is not None:
            taken = (name for step in second for name in step.needs if name not in self._constants)
            leaving = tuple(dict.fromkeys(name for name in (*leaving, *taken) if name not in last))
        parts = (
            self._part(first, leaving, self._optional, self.threads),
            self._part(second, self.outputs, skippable, threads=1),
        )
        return parts[0].bind(**self._constants), parts[1].bind(**self._constants)

    @staticmethod
    def _part(
        steps: Iterable[Step], outputs: tuple[str, ...] | None, optional: Collection[str], threads: int
    ) -> "OperatorGraph":
        part = OperatorGraph(outputs, threads=threads)
        part._optional = frozenset(optional)
        for step in steps:
            part._append(step)
        return part

    def __call__(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The values that leave the graph.

        Args:
            data: A sample or a batch. It is not changed.

        Raises:
            TypeError: If the data is no mapping.
            ValueError: If a name is missing in the data, or is also that of a step; or, with ``threads``, if an
                operator draws random numbers and does not say so.
        """
        if not isinstance(data, Mapping):
            raise TypeError(f"an OperatorGraph takes values by name, such as {{'image': ...}}, got {type(data)}")
        values = {**data, **self._constants}
        structure = self._known.intersection(values)
        plan = self._plans.get(structure)
        if plan is None:
            plan = self._plans[structure] = self._make_plan(values)
        if not plan.levels:
            run(plan.steps, values)
        elif plan.is_checked:
            self._run_in_threads(plan, values)
        else:
            run_checked(plan.steps, values)
            plan.is_checked = True
        if self.outputs is None:
            for name in self._constants:
                del values[name]
            return {**data, **values} if self._constants.keys() & data.keys() else values
        return {name: values[name] for name in self.outputs if name in values}

    def measure(
        self, data: Mapping[str, Any], *, repeats: int = 5, synchronize: Callable[[], object] = bool
    ) -> dict[str, float]:
        """The median seconds that each step takes, by its output; next to nothing for a skipped one.

        Args:
            data: A sample or a batch. Random numbers drawn for it on the CPU are not missed afterwards.
            repeats: How often; another run before is not counted.
            synchronize: Waits until a device has done its work, as `torch.cuda.synchronize`; the default does nothing.
        """
        data = {**data, **self._constants}
        steps = self._make_plan(dict(data)).steps
        seconds: dict[str, list[float]] = {step.output: [] for step in self.steps}
        with KeptGenerators():
            for _ in range(repeats + 1):
                values = dict(data)
                for step in steps:
                    synchronize()
                    start = time.perf_counter()
                    run([step], values)
                    synchronize()
                    seconds[step.output].append(time.perf_counter() - start)
        return {output: median(times[1:] or [0.0]) for output, times in seconds.items()}

    def _make_plan(self, data: dict[str, Any]) -> Plan:
        known, absent, steps = dict.fromkeys(data), set(self._optional.difference(data)), []
        for step in self.steps:
            if step.output in data:
                raise ValueError(f"{step} makes what the data has already; use another name for its output")
            if absent.intersection(step.needs):
                absent.add(step.output)
                continue
            _require(step.needs, known, step)
            known[step.output] = None
            steps.append(step)
        _require([name for name in self.outputs or () if name not in absent], known, "the result")
        return Plan(steps, self.threads)

    def _run_in_threads(self, plan: Plan, values: dict[str, Any]) -> None:
        for own, others in plan.levels:
            modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()  # each thread has its own
            calls = [(step, arguments) for step in others if (arguments := arguments_of(step, values)) is not None]
            futures = [self._threads().submit(apply_in_mode, *call, *modes) for call in calls]
            try:
                run(own, values)
            finally:
                wait(futures)  # or they would work on for a sample that has been given up
            values.update((step.output, future.result()) for (step, _), future in zip(calls, futures, strict=True))
        for step in plan.steps:  # in the order that they have without threads
            if step.output in values:
                values[step.output] = values.pop(step.output)

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None or self._pool[0] != os.getpid():  # threads do not follow a process into its fork
            self._pool = os.getpid(), ThreadPoolExecutor(self.threads - 1, "operators")
        return self._pool[1]


def _require(names: Collection[str], known: Collection[str], taker: object) -> None:
    for name in names:
        if name not in known:
            close = get_close_matches(name, known, 1)
            advice = f"did you mean {close[0]!r}?" if close else "give it with the data or add a step that makes it."
            raise ValueError(f"{taker} takes {name!r}, but the data and the steps before have {list(known)}; {advice}")
