"""An operator graph at work in a loader: one part in the workers, one on the device, cut anew by what they cost."""

import itertools
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import mean, median
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_hpc.data.operator_graph import OperatorGraph
from lightning_hpc.data.placement import Load, Placement, place, sides_of
from lightning_hpc.data.seeding import KeptGenerators

_MEASURED_SAMPLES = 4
_MOST_NOTES = 1000  # batches whose waits are kept: those of the last part of an epoch say how it is now


class PlacedOperators:
    """Where the steps of a graph run now, and what was seen of that. To be called with each batch on the device.

    Args:
        graph: The whole.
        then: Called with what the steps on the device have made, if anything is to be done after them.
        has_device: Whether batches are copied to an accelerator.

    Attributes:
        placement: The two parts.

    Raises:
        ValueError: If a step that runs in a worker only takes a value that a device makes.
    """

    def __init__(
        self, graph: OperatorGraph, then: Callable[[Any], Any] | None = None, *, has_device: bool = False
    ) -> None:
        self._graph, self._then, self._has_device = graph, then, has_device
        self._notes: deque[tuple[float, float]] = deque(maxlen=_MOST_NOTES)
        self._device: torch.device | None = None
        self._use(place(graph, has_device=has_device))

    def __call__(self, batch: Any) -> Any:
        """A batch after the steps that run on the device."""
        if self._on_device is not None:
            batch = self._on_device(batch)
        return batch if self._then is None else self._then(batch)

    def to(self, device: torch.device) -> None:
        """Takes modules to the device: copies of those that are steps, since the workers may need them again."""
        self._device = device
        if isinstance(self._then, nn.Module):
            self._then.to(device)
        self._use(self.placement)

    def _use(self, placement: Placement) -> None:
        self.placement, self._on_device = placement, placement.device
        if placement.device is not None and self._device is not None:
            self._on_device = placement.device.to(self._device)

    def timed(self, next_batch: Callable[[], Any]) -> Callable[[], Any]:
        """The same, where it is noted how long the training waits for a batch, and how long it is busy with it."""
        if not self._has_device:
            return next_batch
        clock, handed_out = time.perf_counter, [0.0, 0.0]

        def next_and_note() -> Any:
            asked = clock()
            waited, ended = handed_out
            if ended:
                self._notes.append((waited, asked - ended))
            batch = next_batch()
            now = clock()
            handed_out[:] = now - asked, now
            return batch

        return next_and_note

    def review(self, loader: DataLoader[Any]) -> bool:
        """Measures the steps, and cuts the graph anew; to be called between two epochs.

        Args:
            loader: Whose samples are read, in a worker if it has any, and collated for that.

        Returns:
            Whether steps have moved, so that workers need the new part.
        """
        if not self._notes or not sides_of(self._graph).either:
            return False
        waiting, training = (median(seconds) for seconds in zip(*self._notes, strict=True))
        self._notes.clear()
        load = measure_load(
            self._graph, loader, device=self._device or torch.device("cpu"), waiting_s=waiting, training_s=training
        )
        former = self.placement.on_device
        self._use(place(self._graph, has_device=True, load=load, current=former))
        return former != self.placement.on_device


def require_transforms(operators: Any, device_transform: Any) -> None:
    """Checks what a loader is to do with samples and batches.

    Raises:
        TypeError: If it is something else.
    """
    if operators is not None and not isinstance(operators, OperatorGraph):
        raise TypeError(f"operators={operators!r} must be an OperatorGraph; add functions to one by its method add")
    if device_transform is not None and not callable(device_transform):
        raise TypeError(f"device_transform={device_transform!r} must be callable with a batch")


def measure_load(
    graph: OperatorGraph, loader: DataLoader[Any], *, device: torch.device, waiting_s: float, training_s: float
) -> Load:
    """What each step takes on each side where it can run, for one batch of samples.

    Args:
        graph: The whole.
        loader: Whose samples are read.
        device: Where batches go.
        waiting_s: See `Load`.
        training_s: See there.
    """
    batch_size = int(loader.batch_size or 1)
    read, reading_s = _read_samples(loader.dataset, batch_size, loader.num_workers)
    sides = sides_of(graph)
    synchronize: Callable[[], object] = partial(torch.cuda.synchronize, device) if device.type == "cuda" else bool
    worker_only, rest = graph.split((*sides.either, *sides.device))
    in_worker, _ = graph.split(sides.device)
    measured = [in_worker.measure(sample) for sample in read[:_MEASURED_SAMPLES]]
    with KeptGenerators():
        collated = loader.collate_fn([worker_only(sample) for sample in read])
    batch = move_data_to_device(collated, device)
    return Load(
        worker_s={name: mean(seconds[name] for seconds in measured) for name in measured[0]},
        device_s=rest.to(device).measure(batch, synchronize=synchronize),
        batch_size=batch_size,
        num_workers=loader.num_workers,
        training_s=training_s,
        waiting_s=waiting_s,
        reading_s=reading_s,
        data_bytes={name: float(_bytes_of(value)) for name, value in read[0].items()},
    )


def _read_samples(dataset: Any, count: int, num_workers: int) -> tuple[list[Any], float]:
    """Some samples as the dataset gives them, and the seconds that one takes."""
    ends: list[float] = []
    with KeptGenerators():
        reader = DataLoader(dataset, batch_size=1, collate_fn=_the_only_one, num_workers=min(num_workers, 1))
        samples = []
        for sample in itertools.islice(reader, count):
            samples.append(sample)
            ends.append(time.perf_counter())
    return samples, (ends[-1] - ends[0]) / max(len(ends) - 1, 1)  # without the start of the worker


def _the_only_one(samples: list[Any]) -> Any:
    (sample,) = samples
    return sample


def _bytes_of(value: Any) -> int:
    """Of all tensors, arrays and byte strings in a value."""
    leaves = tree_leaves(value)
    return sum(len(leaf) if isinstance(leaf, bytes) else getattr(leaf, "nbytes", 1) for leaf in leaves)
