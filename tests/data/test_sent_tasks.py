"""An abandoned slot is free when nobody can have the task any more, and not before."""

import random

import pytest

from lightning_hpc.data.messages import Task
from lightning_hpc.data.ring import Slot
from lightning_hpc.data.sent_tasks import AbandonedTasks, SentTask


def sent(number: int, worker: int | None = None) -> SentTask:
    slot = Slot(4096 * number, 4096)
    return SentTask(Task(number, 0, 0, 0, None, slot.offset, slot.capacity, None), slot, worker, order=number)


def test_a_slot_is_free_when_the_worker_replies() -> None:
    abandoned = AbandonedTasks()
    abandoned.add(sent(3), last_order=5, suspects=[0, 1])
    assert abandoned[3, 0].slot == abandoned.pop((3, 0)) == sent(3).slot
    assert not abandoned
    with pytest.raises(KeyError):
        abandoned[3, 0]


def test_a_slot_is_free_when_all_that_lived_then_have_replied_to_something_later_or_ended() -> None:
    abandoned = AbandonedTasks()
    abandoned.add(sent(3), last_order=5, suspects=[0, 1, 2])
    lives = [0, 1, 2, 3]
    assert not abandoned.on_reply(0, 5, lives)  # it may have been sent before
    assert not abandoned.on_reply(3, 9, lives)
    assert not abandoned.on_reply(0, 6, lives)
    assert not abandoned.on_death(worker=1, life=1, claim=(4, 0))
    assert abandoned.on_reply(None, 6, [0, 3, 4]) == [sent(3).slot]
    assert not abandoned


def test_a_slot_is_free_when_the_worker_that_has_claimed_it_or_whose_it_is_has_ended() -> None:
    abandoned = AbandonedTasks()
    abandoned.add(sent(3), last_order=5, suspects=[0, 1])
    abandoned.add(sent(4, worker=7), last_order=5, suspects=[8])
    assert not abandoned.on_death(worker=0, life=9, claim=(3, 1))
    assert abandoned.on_death(worker=0, life=0, claim=(3, 0)) == [sent(3).slot]
    assert abandoned.on_death(worker=7, life=2, claim=(-1, 0)) == [sent(4).slot]


def test_no_slot_is_free_while_a_worker_has_its_task() -> None:
    """Workers that take tasks from one queue, some of which are abandoned, reply and end at random."""
    for seed in range(200):
        rng, abandoned, free = random.Random(seed), AbandonedTasks(), set[Slot]()
        has: dict[int, int | None] = dict.fromkeys(range(3))
        queue, order = list[int](), 0
        for _ in range(60):
            match rng.randrange(5):
                case 0:
                    order += 1
                    queue.append(order)
                case 1 if queue:
                    takers = [life for life, task in has.items() if task is None]
                    if takers:
                        has[rng.choice(takers)] = queue.pop(0)
                case 2:
                    life, task = rng.choice(list(has.items()))
                    if task is not None:
                        has[life] = None
                        with_task = sent(task).slot
                        if (task, 0) in abandoned._tasks:
                            abandoned.pop((task, 0))
                            free.add(with_task)
                        free.update(abandoned.on_reply(life, task, has))
                case 3:
                    taken = [task for task in has.values() if task is not None and (task, 0) not in abandoned._tasks]
                    queue.clear()
                    for task in taken:
                        abandoned.add(sent(task), order, has)
                case 4 if len(has) > 1:
                    life = rng.choice(list(has))
                    del has[life]
                    has[max(has) + life + 1] = None
                    free.update(abandoned.on_death(life, life, (-1, 0)))
            assert not {sent(task).slot for task in has.values() if task is not None} & free
