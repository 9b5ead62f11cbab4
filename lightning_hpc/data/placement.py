"""Which steps of an operator graph run in the workers and which on the device: by hints, then by what they cost."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from lightning_hpc.data.operator_graph import OperatorGraph
from lightning_hpc.data.operator_plan import Step

_TIE = 0.05
"""Placements whose batches take as long up to this share are equal, and a device that waits for less hardly waits."""


@dataclass(frozen=True)
class Sides:
    """Where the steps of a graph can run, by their outputs, in the order in which they were added.

    Attributes:
        worker: In a worker only: for their hints, because they are random or have a condition (a sample has its own
            seed and its own condition, a batch has not), or because such a step takes their values.
        either: On both sides.
        device: On the device only: for their hints, or because they take a value that is made there.
    """

    worker: tuple[str, ...]
    either: tuple[str, ...]
    device: tuple[str, ...]


@dataclass(frozen=True)
class Load:
    """What was measured while the pipeline fed a training.

    Attributes:
        worker_s: Seconds that each step takes for a sample in a worker, by its output, as
            `OperatorGraph.measure` of ``graph.split(sides.device)[0]`` on a sample finds.
        device_s: Seconds that each takes for a batch on the device: the same of the second graph of
            ``graph.split((*sides.either, *sides.device))`` on a batch there.
        batch_size: Samples of a batch.
        num_workers: Worker processes; 0: the trainer's process makes the batches itself.
        training_s: Seconds a batch that the device works on the training alone.
        waiting_s: Seconds a batch that the training waits for data, with the steps placed as they were.
        reading_s: Seconds a sample that a worker needs for all but the steps.
        data_bytes: Bytes of each value of a sample as the dataset reads it; of equal size where it is not given.

    Raises:
        ValueError: If a figure is negative, or ``batch_size`` below 1.
    """

    worker_s: Mapping[str, float]
    device_s: Mapping[str, float]
    batch_size: int
    num_workers: int
    training_s: float
    waiting_s: float
    reading_s: float = 0.0
    data_bytes: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size!r} must be at least 1")
        for name in ("num_workers", "training_s", "waiting_s", "reading_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least 0")


@dataclass(frozen=True)
class Placement:
    """A graph in two parts.

    Attributes:
        worker: Takes a sample; its result is what a batch is made of.
        device: Takes the batch on the device; None if no step runs there.
        on_device: Outputs of the steps that run there.
        reason: Why, in one line.
    """

    worker: OperatorGraph
    device: OperatorGraph | None
    on_device: frozenset[str]
    reason: str


def sides_of(graph: OperatorGraph) -> Sides:
    """Where each step can run.

    Raises:
        ValueError: If a step that runs in a worker only takes a value that a device makes.
    """
    device: dict[str, Step] = {}
    for step in graph.steps:
        source = next((device[name] for name in step.needs if name in device), None)
        if source is not None and not (_may_move(step) or step.hints.runs_on == "device"):
            raise ValueError(
                f"{step} runs in a worker ({_why_not(step)}) but takes what {source} makes on the device;"
                " let the one run on the device or the other in a worker"
            )
        if source is not None or step.hints.runs_on == "device":
            device[step.output] = step
    worker: set[str] = set()
    needed: set[str] = set()
    for step in reversed(graph.steps):
        if step.output not in device and (step.output in needed or not _may_move(step)):
            worker.add(step.output)
            needed.update(step.needs)
    names = [step.output for step in graph.steps]
    return Sides(
        tuple(name for name in names if name in worker),
        tuple(name for name in names if name not in worker and name not in device),
        tuple(device),
    )


def place(
    graph: OperatorGraph, *, has_device: bool, load: Load | None = None, current: Collection[str] | None = None
) -> Placement:
    """Cuts a graph into a part for the workers and one for the device.

    Without measurements, steps whose computation is more than low go to the device if they may, and of the cuts that
    are left the one with the fewest bytes crossing is taken. With measurements, a batch takes the time of the slower
    side: the workers together, or the device with its training; the cut with the shortest time is taken. Of cuts that
    take equally long, the one in use is kept, or else the one with the fewest bytes crossing, and then the one with
    less on the device. Nothing more moves to a device that hardly waits. Cuts count only where each step was measured
    on its side; where that fails for the one in use, hints decide.

    Steps that may run on either side move in the order in which they were added, the later ones first.

    Args:
        graph: The whole.
        has_device: Whether there is a device that batches are copied to. Without one, steps that need it take the
            batch in the trainer's process, and all others run in the workers.
        load: What was measured.
        current: Outputs of the steps that ran on the device while the load was measured, `Placement.on_device`; by
            default those that can run nowhere else.

    Raises:
        ValueError: As `sides_of`.
    """
    sides = sides_of(graph)
    if not has_device:
        why = f"no device: {_names(graph, sides.device)} on the batch, all else in the workers"
        return _placement(graph, frozenset(sides.device), why)
    movable = sides.either
    # From the least on the device to the most: of equal cuts, `min` takes the first.
    cuts = [frozenset((*movable[index:], *sides.device)) for index in range(len(movable), -1, -1)]
    if len(cuts) == 1:
        return _placement(graph, cuts[0], "the hints leave no choice")
    if load is None:
        return _place_by_hints(graph, cuts, "by hints")
    in_use = frozenset(sides.device if current is None else current)
    seconds = {cut: found for cut in cuts if (found := _batch_seconds(graph, load, cut)) is not None}
    if in_use not in seconds:
        return _place_by_hints(graph, cuts, "by hints, as the load lacks steps of the placement in use")
    return _place_by_load(graph, load, seconds, in_use)


def _may_move(step: Step) -> bool:
    return step.hints.runs_on == "any" and not step.hints.random and step.when is None


def _why_not(step: Step) -> str:
    if step.hints.runs_on == "worker":
        return "runs_on='worker'"
    return "random=True" if step.hints.random else f"when={step.when!r}"


def _place_by_hints(graph: OperatorGraph, cuts: list[frozenset[str]], reason: str) -> Placement:
    heavy = {step.output for step in graph.steps if step.output in cuts[-1] and step.hints.compute != "low"}
    crossing = {cut: _crossing_bytes(graph, {}, cut) for cut in cuts if heavy <= cut}
    best = min(crossing, key=lambda cut: crossing[cut])
    why = f"compute of {_names(graph, heavy)} is more than low" if heavy else "fewest bytes cross"
    return _placement(graph, best, f"{reason}: {_names(graph, best)} on the device, as {why}")


def _place_by_load(
    graph: OperatorGraph, load: Load, seconds: dict[frozenset[str], float], in_use: frozenset[str]
) -> Placement:
    now, reason = seconds[in_use], "measured"
    if load.waiting_s <= _TIE * (load.waiting_s + load.training_s):
        reason = "measured, the device hardly waits"
        seconds = {cut: found for cut, found in seconds.items() if cut <= in_use}
    limit = (1 + _TIE) * min(seconds.values())
    if now <= limit:
        why = f"{_ms(now)} a batch, elsewhere hardly less"
        return _placement(graph, in_use, f"{reason}: {_names(graph, in_use)} on the device, {why}")
    equal = [cut for cut, found in seconds.items() if found <= limit]
    best = min(equal, key=lambda cut: _crossing_bytes(graph, load.data_bytes, cut))
    why = f"{_ms(seconds[best])} a batch instead of {_ms(now)}"
    return _placement(graph, best, f"{reason}: {_names(graph, best)} on the device, {why}")


def _batch_seconds(graph: OperatorGraph, load: Load, on_device: frozenset[str]) -> float | None:
    """The time of the slower side; None if a step was not measured on its side."""
    outputs = [step.output for step in graph.steps]
    try:
        sample = sum(load.worker_s[name] for name in outputs if name not in on_device) + load.reading_s
        device = sum(load.device_s[name] for name in outputs if name in on_device) + load.training_s
    except KeyError:
        return None
    workers = sample * load.batch_size
    return max(workers / load.num_workers, device) if load.num_workers else workers + device


def _crossing_bytes(graph: OperatorGraph, data_bytes: Mapping[str, float], on_device: frozenset[str]) -> float:
    """Bytes of a sample that are copied to the device, by the hints."""
    size = defaultdict(lambda: 1.0, data_bytes)
    for step in graph.steps:  # looking up an input enters it, so that afterwards all values have their size
        size[step.output] = step.hints.memory * sum(size[name] for name in step.inputs)
    crossing = set(size if graph.outputs is None else graph.outputs)
    crossing.update(name for step in graph.steps if step.output in on_device for name in step.needs)
    return sum(size[name] for name in crossing - on_device)


def _placement(graph: OperatorGraph, on_device: frozenset[str], reason: str) -> Placement:
    worker, device = graph.split(on_device)
    return Placement(worker, device if on_device else None, on_device, reason)


def _names(graph: OperatorGraph, outputs: Collection[str]) -> str:
    names = [repr(step.output) for step in graph.steps if step.output in outputs]
    return ", ".join(names) if names else "nothing"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
