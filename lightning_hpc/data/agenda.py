"""Which batches are to be made next: those of an epoch, then those of the one that will probably follow."""

from collections import Counter
from collections.abc import Callable

from lightning_hpc.data.local_reader import EpochPlan
from lightning_hpc.data.messages import Task
from lightning_hpc.data.ring import Slot
from lightning_hpc.data.sent_tasks import SentTask


class Agenda:
    """Makes the tasks of epoch after epoch, and numbers them.

    Args:
        parts: Among how many workers an iterable dataset is split; None if any worker can make any batch.

    Attributes:
        end: Number of the first task that is not of the present epoch; None if there is none yet.
    """

    def __init__(self, parts: int | None) -> None:
        self._parts = parts
        self._numbered = 0
        self._started = -1  # counts epochs
        self._plan: EpochPlan | None = None
        self._guess: EpochPlan | None = None
        self.end: int | None = None

    def begin(self, plan: EpochPlan) -> int | None:
        """Begins an epoch.

        Returns:
            Number of its first task if it is the one that the plan before has guessed, and None if it is begun now.
        """
        first = self.end if plan is self._guess else None
        if plan is not self._guess:
            self._start(plan)
        self._guess = self.end = None
        return first

    def next(self, take_slot: Callable[[], Slot]) -> SentTask | None:
        """The next task, for a slot of its own; None if there is none."""
        while self._plan is not None:
            worker = self._choose_worker()
            index = next(self._plan.indices, self) if worker != -1 else self
            if index is not self:
                return self._make(self._plan, index, worker, take_slot())
            if not self._look_ahead(self._plan):
                return None
        return None

    def pass_by(self, worker: int) -> None:
        """Asks for no more of a worker's part in this epoch."""
        self._over.add(worker)

    def _start(self, plan: EpochPlan) -> None:
        self._plan = plan
        self._started += 1
        self._last_worker = -1
        self._over: set[int] = set()  # workers whose part is over
        self._asked: Counter[int] = Counter()  # batches of each part, in this epoch

    def _look_ahead(self, plan: EpochPlan) -> bool:
        """Goes on with the epoch that will probably follow; returns whether there is one."""
        if self._guess is not None:
            return False  # one epoch ahead is enough, and its end would move ours
        self._plan = None
        self._guess = plan.guess_next() if plan.guess_next is not None else None
        if self._guess is None:
            return False
        self.end = self._numbered
        self._start(self._guess)
        return True

    def _choose_worker(self) -> int | None:
        """None: whoever is free. Else in turn, among those whose part is not over; -1 if there is none."""
        if self._parts is None:
            return None
        for step in range(1, self._parts + 1):
            worker = (self._last_worker + step) % self._parts
            if worker not in self._over:
                return worker
        return -1

    def _make(self, plan: EpochPlan, index: object, worker: int | None, slot: Slot) -> SentTask:
        task = Task(
            number=self._numbered,
            attempt=0,
            generation=self._started,
            seed=plan.seed,
            epoch=plan.dataset_epoch,
            offset=slot.offset,
            capacity=slot.capacity,
            index=index,
            skip=0 if worker is None else self._asked[worker],
        )
        self._numbered += 1
        if worker is not None:
            self._asked[worker] += 1
            self._last_worker = worker
        return SentTask(task, slot, worker)
