import numpy as np
import pytest

from lightning_hpc.memory.peak_model import PeakModel
from lightning_hpc.memory.saved_activations import Holding
from tests.memory.made_up_steps import Step


@pytest.mark.parametrize("tangled", [False, True])
def test_it_replays_the_step_for_any_choice(tangled: bool) -> None:
    for seed in range(40):
        step = Step(seed, 1 + seed % 4, tangled=tangled)
        model = PeakModel(step.holdings, step.names)
        assert {plan: model.peak_bytes(plan) for plan in step.plans()} == {
            plan: step.replay(plan) for plan in step.plans()
        }


def test_shares_and_moments_grow_with_the_blocks_and_not_with_the_tensors() -> None:
    models = [PeakModel(step.holdings, step.names) for step in (Step(1, 50), Step(2, 50, equal=True))]
    assert all(model.moments <= 52 and len(model.shares) <= 5 * 50 for model in models)


def test_plans_in_bulk_are_those_one_by_one() -> None:
    step = Step(3, 13)
    model = PeakModel(step.holdings, step.names)
    plans = np.random.default_rng(0).random((5000, 13)) < 0.5
    peaks = model.peaks(plans)
    for index in (0, 1, 4095, 4096, 4999):
        names = [name for name, chosen in zip(step.names, plans[index], strict=True) if chosen]
        assert peaks[index] == model.peak_bytes(names)


def test_a_storage_that_never_ends_stays_to_the_last() -> None:
    model = PeakModel([Holding(0, 7, 0), Holding(1, 5, 1, 2), Holding(2, 3, 3, 4)], [])
    assert model.peak_bytes(()) == 12


def test_a_step_that_saves_nothing_has_no_peak() -> None:
    assert PeakModel([], ["a"]).peak_bytes(["a"]) == 0


def test_what_a_block_keeps_either_way_is_kept_only_while_both_ways_keep_it() -> None:
    plain, checkpointed = Holding(0, 7, 0, 9, "a", "plain"), Holding(0, 7, 1, 3, "a", "checkpointed")
    model = PeakModel([plain, checkpointed, Holding(1, 5, 4, 5), Holding(2, 4, 6, 8)], ["a"])
    assert (model.peak_bytes(()), model.peak_bytes(["a"])) == (12, 7)
