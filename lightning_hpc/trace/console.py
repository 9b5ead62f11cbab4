"""The console line of a training run: the means of a few iterations."""

from collections.abc import Sequence


class ConsoleMeans:
    """Adds up iterations and prints their means as ``data_prep=12.4ms schedule=3.2ms compute=58.1ms comm=8.7ms``.

    Compute is forward, backward and optimizer. Communication is ``n/a`` where one of the iterations does not know it.

    Attributes:
        count: Iterations added.
    """

    def __init__(self) -> None:
        self.count = 0
        self._data_prep_ns = self._schedule_ns = self._compute_ns = 0
        self._comm_ns: int | None = 0

    def add(self, charged_ns: Sequence[int], comm_ns: int | None) -> None:
        """Adds one iteration.

        Args:
            charged_ns: Nanoseconds by `Phase`, in its order; backward without exposed communication.
            comm_ns: Nanoseconds of exposed communication. None where nobody measures it.
        """
        data_prep, _, schedule, forward, backward, optimizer = charged_ns
        self.count += 1
        self._data_prep_ns += data_prep
        self._schedule_ns += schedule
        self._compute_ns += forward + backward + optimizer
        self._comm_ns = None if comm_ns is None or self._comm_ns is None else self._comm_ns + comm_ns

    def line(self) -> str:
        """The line for the iterations added so far, of which there must be one at least."""
        assert self.count > 0
        times = {
            "data_prep": self._data_prep_ns,
            "schedule": self._schedule_ns,
            "compute": self._compute_ns,
            "comm": self._comm_ns,
        }
        return " ".join(
            f"{name}=n/a" if time_ns is None else f"{name}={time_ns / self.count / 1e6:.1f}ms"
            for name, time_ns in times.items()
        )
