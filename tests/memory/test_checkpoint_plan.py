import random

import numpy as np
import pytest

from lightning_hpc.memory import checkpoint_plan
from lightning_hpc.memory.checkpoint_plan import choose_blocks
from lightning_hpc.memory.peak_model import PeakModel
from tests.memory.made_up_steps import Step

INSTANCES = 150


def optimum(step: Step, peaks: dict[tuple[str, ...], int], budget: int) -> float | None:
    return min((step.cost(plan) for plan, peak in peaks.items() if peak <= budget), default=None)


def instances(
    *, most_blocks: int, tangled: bool = False
) -> list[tuple[Step, PeakModel, dict[tuple[str, ...], int], int]]:
    """Steps with a budget between the least and the largest peak."""
    found = []
    for seed in range(INSTANCES):
        step = Step(seed, 2 + seed % (most_blocks - 1), equal=seed % 7 == 0, tangled=tangled)
        model = PeakModel(step.holdings, step.names)
        peaks = {plan: model.peak_bytes(plan) for plan in step.plans()}
        budget = random.Random(seed).randint(min(peaks.values()), max(peaks.values()))
        found.append((step, model, peaks, budget))
    return found


@pytest.mark.parametrize("tangled", [False, True])
def test_few_blocks_get_the_exhaustive_optimum(tangled: bool) -> None:
    for step, model, peaks, budget in instances(most_blocks=6, tangled=tangled):
        plan = choose_blocks(model, step.seconds, budget)
        assert plan.fits
        assert plan.peak_bytes == peaks[plan.blocks]
        assert plan.plain_peak_bytes == peaks[()]
        assert plan.extra_seconds == pytest.approx(step.cost(plan.blocks))
        assert plan.extra_seconds == pytest.approx(optimum(step, peaks, budget))


@pytest.mark.parametrize(("most_states", "tolerance"), [(4096, 1e-9), (4, 0.05)])
def test_the_search_for_many_blocks_gets_the_optimum_or_nearly(
    monkeypatch: pytest.MonkeyPatch, most_states: int, tolerance: float
) -> None:
    monkeypatch.setattr(checkpoint_plan, "_MOST_BLOCKS_TO_TRY", 0)
    monkeypatch.setattr(checkpoint_plan, "_MOST_STATES", most_states)
    for step, model, peaks, budget in instances(most_blocks=7):
        plan = choose_blocks(model, step.seconds, budget)
        best = optimum(step, peaks, budget)
        assert plan.fits
        assert best is not None
        assert plan.extra_seconds <= best * (1 + tolerance) + 1e-12


def test_the_search_is_exact_by_itself_for_blocks_one_after_the_other() -> None:
    for step, model, peaks, budget in instances(most_blocks=7):
        cost = np.array(step.seconds)
        plans = checkpoint_plan._search(model, cost, budget)
        assert min(plans @ cost) == pytest.approx(optimum(step, peaks, budget))


def test_tangled_blocks_fit_and_are_near_the_optimum_mostly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_plan, "_MOST_BLOCKS_TO_TRY", 0)
    near = 0
    for step, model, peaks, budget in instances(most_blocks=6, tangled=True):
        plan = choose_blocks(model, step.seconds, budget)
        best = optimum(step, peaks, budget)
        assert best is not None
        near += plan.fits and plan.extra_seconds <= best * 1.05 + 1e-12
    assert near >= 0.99 * INSTANCES


def test_a_hundred_blocks_are_chosen_among() -> None:
    for equal in (True, False):
        step = Step(5, 100, equal=equal)
        model = PeakModel(step.holdings, step.names)
        least = model.peak_bytes(step.names)
        budget = (least + model.peak_bytes(())) // 2
        plan = choose_blocks(model, step.seconds, budget)
        assert plan.fits
        assert 0 < plan.extra_seconds < sum(step.seconds)


@pytest.mark.parametrize("blocks", [4, 20])
def test_without_need_nothing_is_recomputed(blocks: int) -> None:
    step = Step(1, blocks)
    model = PeakModel(step.holdings, step.names)
    assert choose_blocks(model, step.seconds, model.peak_bytes(())).blocks == ()


@pytest.mark.parametrize("blocks", [4, 20])
def test_an_impossible_budget_gets_a_low_peak_and_says_so(blocks: int) -> None:
    step = Step(1, blocks)
    model = PeakModel(step.holdings, step.names)
    plan = choose_blocks(model, step.seconds, 1)
    assert not plan.fits
    assert plan.peak_bytes <= model.peak_bytes(step.names)


def test_blocks_that_cost_nothing_are_left_alone() -> None:
    step = Step(1, 3)
    model = PeakModel(step.holdings, step.names)
    assert choose_blocks(model, [0.0, 0.0, 0.0], model.peak_bytes(())).blocks == ()
