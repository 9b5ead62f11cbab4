"""The means of a few iterations, for the console and for loggers."""

from collections.abc import Sequence

from lightning_hpc.trace.timeline import Phase


class IntervalMeans:
    """Adds up iterations, and gives their means.

    Attributes:
        count: Iterations added.
    """

    def __init__(self) -> None:
        self.count = 0
        self._charged_ns = [0] * len(Phase)
        self._comm_ns: int | None = 0
        self._total_ns = 0
        self._samples: int | None = 0

    def add(self, charged_ns: Sequence[int], comm_ns: int | None, total_ns: int, samples: int | None) -> None:
        """Adds one iteration.

        Args:
            charged_ns: Nanoseconds by `Phase`, in its order; backward without exposed communication.
            comm_ns: Nanoseconds of exposed communication. None where nobody measures it.
            total_ns: Nanoseconds of the iteration.
            samples: Samples of its batch. None where nobody can tell.
        """
        self.count += 1
        self._charged_ns = [sum_ns + ns for sum_ns, ns in zip(self._charged_ns, charged_ns, strict=True)]
        self._comm_ns = None if comm_ns is None or self._comm_ns is None else self._comm_ns + comm_ns
        self._total_ns += total_ns
        self._samples = None if samples is None or self._samples is None else self._samples + samples

    def line(self) -> str:
        """``data_prep=12.4ms schedule=3.2ms compute=58.1ms comm=8.7ms``, for one iteration added at least.

        Compute is forward, backward and optimizer. Communication is ``n/a`` where an iteration does not know it.
        """
        data_prep, _, schedule, forward, backward, optimizer = self._charged_ns
        times = {
            "data_prep": data_prep,
            "schedule": schedule,
            "compute": forward + backward + optimizer,
            "comm": self._comm_ns,
        }
        return " ".join(
            f"{name}=n/a" if time_ns is None else f"{name}={self._mean_ms(time_ns):.1f}ms"
            for name, time_ns in times.items()
        )

    def metrics(self) -> dict[str, float]:
        """Milliseconds an iteration by the names of a step record, and samples a second; without what is unknown."""
        metrics = {
            f"{phase.name.lower()}_ms": self._mean_ms(time_ns)
            for phase, time_ns in zip(Phase, self._charged_ns, strict=True)
        }
        if self._comm_ns is not None:
            metrics["comm_ms"] = self._mean_ms(self._comm_ns)
        metrics["total_ms"] = self._mean_ms(self._total_ns)
        if self._samples is not None:
            metrics["samples_per_second"] = self._samples / self._total_ns * 1e9
        return metrics

    def _mean_ms(self, time_ns: int) -> float:
        return time_ns / self.count / 1e6
