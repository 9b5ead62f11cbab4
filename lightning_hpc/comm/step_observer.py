"""Notes what steps compute, beside what they communicate, for the cost model."""

import statistics
import time

from lightning_hpc.comm.cost_model import Workload
from lightning_hpc.comm.hook import GradientReducer
from lightning_hpc.comm.stats import CommStats


class StepObserver:
    """Follows the buckets of a reducer, and the ends of optimizer steps.

    Args:
        reducer: Tells when a bucket is computed.
        stats: Of the reducer.
    """

    def __init__(self, reducer: GradientReducer, stats: CommStats) -> None:
        self._reducer, self._stats = reducer, stats
        self._arrivals: list[tuple[float, int]] = []
        self._observed: list[Workload] = []
        self._ended: float | None = None
        reducer.on_bucket = self._arrive

    def finish_step(self) -> float | None:
        """To be called at the end of each optimizer step.

        Returns:
            What it took, in seconds; None for the first one, whose beginning is not known.
        """
        began, now = self._ended, time.perf_counter()
        if began is not None and self._arrivals:
            self._observed.append(self._workload(began, now))
        self._ended = now
        self._arrivals.clear()
        return None if began is None else now - began

    def take_workload(self) -> Workload | None:
        """The median of each time over the steps since the last call; None if nothing was observed."""
        observed, self._observed = self._observed, []
        if not observed:
            return None
        # The first steps may have other buckets than those that follow.
        sizes = [numel for _, numel in observed[-1].ready]
        alike = [workload for workload in observed if [numel for _, numel in workload.ready] == sizes]
        times = zip(*([at for at, _ in workload.ready] for workload in alike), strict=True)
        ready = tuple((statistics.median(time_), numel) for time_, numel in zip(times, sizes, strict=True))
        tail, step = (
            statistics.median(getattr(workload, name) for workload in alike)
            for name in ("tail_seconds", "step_seconds")
        )
        return Workload(ready, tail, alike[-1].observed, step)

    def _arrive(self, numel: int) -> None:
        self._arrivals.append((time.perf_counter(), numel))

    def _workload(self, began: float, now: float) -> Workload:
        reduced, codec = self._reducer.reduced_at, self._reducer.codec
        if reduced is not None:
            ready = tuple((at - began, numel) for at, numel in self._arrivals)
            return Workload(ready, now - reduced, codec, now - began)
        # On CUDA the host only launches: take a third of the computation for forward, which backward doubles.
        waited = self._stats.exposed_seconds / max(self._stats.reductions, 1)
        compute = max(now - began - waited, 0.0)
        count = len(self._arrivals)
        ready = tuple(
            (compute * (1 + 2 * (index + 1) / count) / 3, numel) for index, (_, numel) in enumerate(self._arrivals)
        )
        return Workload(ready, 0.0, codec, now - began)
