"""An operator graph at work in a loader: one part in the workers, one on the device, cut anew by what they cost."""

import time
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Any

from torch.utils._pytree import tree_leaves

from lightning_hpc.data.operator_graph import OperatorGraph
from lightning_hpc.data.placement import Load, place, sides_of

_MEASURED_SAMPLES = 4
_MOST_NOTES = 1000  # batches whose waits are kept: those of the last part of an epoch say how it is now


class PlacedOperators:
    """Where the steps of a graph run now, and what was seen of that.

    Args:
        graph: The whole.
        has_device: Whether batches are copied to an accelerator.

    Attributes:
        placement: The two parts.

    Raises:
        ValueError: If a step that runs in a worker only takes a value that a device makes.
    """

    def __init__(self, graph: OperatorGraph, *, has_device: bool) -> None:
        self._graph, self._has_device = graph, has_device
        self._notes: list[tuple[float, float]] = []
        self.placement = place(graph, has_device=has_device)

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
        former, self.placement = (
            self.placement,
            place(self._graph, has_device=True, load=load, current=self.placement.on_device),
        )
        return former.on_device != self.placement.on_device


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
