"""An operator graph at work in a loader: one part in the workers, one on the device, cut anew by what they cost."""

import time
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_hpc.data.operator_graph import OperatorGraph
from lightning_hpc.data.placement import Load, Placement, place, sides_of

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
        self._notes: list[tuple[float, float]] = []
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

    def note(self, waited_s: float, trained_s: float) -> None:
        """Takes note of a batch.

        Args:
            waited_s: How long the training waited for it.
            trained_s: How long it took from then until the next one was asked for.
        """
        if self._has_device:
            self._notes = [*self._notes[1 - _MOST_NOTES :], (waited_s, trained_s)]

    def review(self, samples: Callable[[int], Sequence[Any]], **conditions: Any) -> bool:
        """Measures the steps, and cuts the graph anew; to be called between two epochs.

        Args:
            samples: Reads so many samples as the dataset gives them.
            **conditions: As for `measure_load`.

        Returns:
            Whether steps have moved, so that workers need the new part.
        """
        if not self._notes or not sides_of(self._graph).either:
            return False
        waiting, training = (median(seconds) for seconds in zip(*self._notes, strict=True))
        self._notes = []
        load = measure_load(self._graph, samples, waiting_s=waiting, training_s=training, **conditions)
        former = self.placement.on_device
        self._use(place(self._graph, has_device=True, load=load, current=former))
        return former != self.placement.on_device


def measure_load(
    graph: OperatorGraph,
    samples: Callable[[int], Sequence[Any]],
    *,
    to_batch: Callable[[list[Any]], Any],
    synchronize: Callable[[], object],
    batch_size: int,
    num_workers: int,
    waiting_s: float,
    training_s: float,
) -> Load:
    """What each step takes on each side where it can run, for one batch of samples.

    Args:
        graph: The whole.
        samples: Reads so many samples as the dataset gives them, each a mapping.
        to_batch: Collates samples and puts the batch on the device.
        synchronize: Waits until the device has done its work.
        batch_size: Samples of a batch.
        num_workers: As all that follow: see `Load`.
        waiting_s: See there.
        training_s: See there.
    """
    start = time.perf_counter()
    read = samples(batch_size)
    reading_s = (time.perf_counter() - start) / len(read)
    sides = sides_of(graph)
    worker_only, rest = graph.split((*sides.either, *sides.device))
    in_worker, _ = graph.split(sides.device)
    measured = [in_worker.measure(sample) for sample in read[:_MEASURED_SAMPLES]]
    return Load(
        worker_s={name: mean(seconds[name] for seconds in measured) for name in measured[0]},
        device_s=rest.measure(to_batch([worker_only(sample) for sample in read]), synchronize=synchronize),
        batch_size=batch_size,
        num_workers=num_workers,
        training_s=training_s,
        waiting_s=waiting_s,
        reading_s=reading_s,
        data_bytes={name: float(_bytes_of(value)) for name, value in read[0].items()},
    )


def _bytes_of(value: Any) -> int:
    """Of all tensors, arrays and byte strings in a value."""
    leaves = tree_leaves(value)
    return sum(len(leaf) if isinstance(leaf, bytes) else getattr(leaf, "nbytes", 1) for leaf in leaves)
