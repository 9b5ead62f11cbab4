from dataclasses import replace

import pytest

from lightning_hpc.trace.straggler_watch import StragglerWatch
from lightning_hpc.trace.stragglers import Straggler

SLOW = Straggler(
    rank=3,
    cause="data",
    phase="data_prep",
    own_ms=20.0,
    others_ms=5.8,
    step_ms=121.0,
    repaired_ms=109.0,
    slow_steps=1.0,
    share=0.098,
    confidence=1.0,
)


def changes(watch: StragglerWatch, *found: Straggler) -> list[str]:
    return [news.change for news in watch.update(found, steps=100, total_ms=1000.0)]


def test_a_straggler_is_told_when_it_appears_and_when_it_is_gone() -> None:
    watch = StragglerWatch()
    assert [changes(watch), changes(watch, SLOW), changes(watch, SLOW)] == [[], ["appeared"], []]
    # One window without it may be chance.
    assert [changes(watch), changes(watch, SLOW), changes(watch)] == [[], [], []]
    assert [changes(watch), changes(watch)] == [["gone"], []]
    assert changes(watch, SLOW) == ["appeared"]


@pytest.mark.parametrize(("share", "told"), [(0.11, False), (0.14, False), (0.16, True), (0.06, True), (0.09, False)])
def test_a_cost_that_changes_much_is_told_once(share: float, told: bool) -> None:
    watch = StragglerWatch()
    changes(watch, SLOW)
    changed = replace(SLOW, share=share)
    assert changes(watch, changed) == ["changed"] * told
    assert changes(watch, changed) == []


def test_small_costs_change_by_chance() -> None:
    watch = StragglerWatch()
    changes(watch, replace(SLOW, share=0.016))
    assert changes(watch, replace(SLOW, share=0.04)) == []


def test_another_cause_of_the_same_rank_is_another_straggler() -> None:
    watch = StragglerWatch()
    changes(watch, SLOW)
    assert changes(watch, replace(SLOW, cause="compute", phase="forward")) == ["appeared"]


def test_the_news_have_the_figures() -> None:
    (news,) = StragglerWatch().update((SLOW,), steps=100, total_ms=12100.0)
    assert str(news) == (
        "rank 3 is slow by data (data_prep): 14.2 ms a step more than the others, which costs 9.8% of the time (without"
        " that a step would take 109 ms, not 121 ms)"
    )


def test_the_summary_adds_up_what_was_lost() -> None:
    watch = StragglerWatch()
    changes(watch, SLOW, replace(SLOW, rank=1, share=0.2))
    changes(watch, SLOW)
    changes(watch)
    assert watch.lost_ms == {(3, "data"): pytest.approx(196.0), (1, "data"): pytest.approx(200.0)}
    assert watch.summary() == (
        "slow ranks cost 0.4 s (13.2%) of 3.0 s in 300 steps: rank 1 by data 0.2 s, rank 3 by data 0.2 s"
    )


def test_a_fit_without_stragglers_has_a_summary_too() -> None:
    watch = StragglerWatch()
    changes(watch)
    assert watch.summary() == "no rank was slow alone in 1.0 s in 100 steps"
