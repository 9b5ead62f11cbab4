"""Tasks are numbered through, in the order of the sampler, each part in turn, and into the epoch that follows."""

from collections.abc import Iterable

from lightning_hpc.data.agenda import Agenda
from lightning_hpc.data.local_reader import EpochPlan
from lightning_hpc.data.ring import Slot


def plan(indices: Iterable[int], seed: int = 0, following: EpochPlan | None = None) -> EpochPlan:
    return EpochPlan(iter(indices), seed, guess_next=lambda: following)


def tasks(agenda: Agenda, count: int) -> list[tuple[int, int, int, int | None, int]]:
    """Number, generation, index, worker and batches of the part before it."""
    found = [agenda.next(lambda: Slot(0, 8)) for _ in range(count)]
    return [
        (sent.task.number, sent.task.generation, sent.task.index, sent.worker, sent.task.skip)
        for sent in found
        if sent is not None
    ]


def test_an_epoch_is_followed_by_the_one_that_was_guessed_and_that_one_by_none() -> None:
    third = plan([40])
    second = plan([30, 31], seed=5, following=third)
    agenda = Agenda(None)
    assert agenda.begin(plan([20, 21], following=second)) is None
    assert tasks(agenda, 2) == [(0, 0, 20, None, 0), (1, 0, 21, None, 0)]
    assert agenda.end is None
    assert tasks(agenda, 9) == [(2, 1, 30, None, 0), (3, 1, 31, None, 0)]
    assert agenda.end == 2
    assert agenda.begin(second) == 2
    assert tasks(agenda, 9) == [(4, 2, 40, None, 0)]
    assert agenda.begin(third) == 4


def test_a_wrong_guess_is_dropped() -> None:
    agenda = Agenda(None)
    agenda.begin(plan([20], following=plan([30])))
    tasks(agenda, 2)
    assert agenda.begin(plan([50])) is None
    assert tasks(agenda, 9) == [(2, 2, 50, None, 0)]
    assert agenda.end is None


def test_parts_take_turns_until_they_are_over_and_all_again_in_the_next_epoch() -> None:
    agenda = Agenda(3)
    agenda.begin(plan(range(99)))
    assert [task[3:] for task in tasks(agenda, 4)] == [(0, 0), (1, 0), (2, 0), (0, 1)]
    agenda.pass_by(1)
    assert [task[3:] for task in tasks(agenda, 3)] == [(2, 1), (0, 2), (2, 2)]
    agenda.pass_by(0)
    agenda.pass_by(2)
    assert tasks(agenda, 1) == []
    agenda.begin(plan(range(99)))
    assert [task[3:] for task in tasks(agenda, 3)] == [(0, 0), (1, 0), (2, 0)]
