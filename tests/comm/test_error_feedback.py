"""What a residual must survive: other runs, the same runs again, a checkpoint."""

import random

import pytest
import torch
from torch import Tensor

from lightning_hpc.comm.error_feedback import ErrorFeedback
from lightning_hpc.comm.layout import Grain, ParameterSpec, Run, assign_homes, codec_slices

CPU = torch.device("cpu")
PARAMETERS = [ParameterSpec("a", 1000, 10), ParameterSpec("b", 3, 3), ParameterSpec("c", 130, 13)]
HOMES = assign_homes(PARAMETERS, 2)
ONE_BUCKET = [PARAMETERS]
OTHER_BUCKETS = [[PARAMETERS[2]], [PARAMETERS[1], PARAMETERS[0]]]


def runs_of(buckets: list[list[ParameterSpec]]) -> list[Run]:
    """What one rank of two encodes: the second leaf of each slice."""
    layouts = [layout for bucket in buckets for layout in codec_slices(bucket, 2, 600, Grain(block=64), HOMES)]
    return [layout.run(*layout.bounds[1:]) for layout in layouts]


def residuals(feedback: ErrorFeedback, runs: list[Run]) -> dict[tuple[str, int], Tensor]:
    """A copy of each part's residual, as the runs have it."""
    found = {}
    for run in runs:
        residual = feedback.residual(run, CPU)
        assert residual.shape == (run.numel,)
        for part in run.parts:
            offset = part.offset - run.start
            found[part.parameter.name, part.start] = residual[offset : offset + part.numel].clone()
    return found


def fill(feedback: ErrorFeedback, runs: list[Run], seed: int) -> None:
    """Writes to each part what depends on the part alone."""
    for run in runs:
        residual = feedback.residual(run, CPU)
        for part in run.parts:
            offset = part.offset - run.start
            generator = torch.Generator().manual_seed(seed + 17 * part.start + ord(part.parameter.name))
            residual[offset : offset + part.numel] = torch.randn(part.numel, generator=generator)


def assert_same(mine: dict[tuple[str, int], Tensor], others: dict[tuple[str, int], Tensor]) -> None:
    assert mine.keys() == others.keys()
    for key, value in mine.items():
        assert torch.equal(value, others[key]), key


def test_zeros_at_first_and_then_the_same_tensor() -> None:
    feedback, (run, *_) = ErrorFeedback(), runs_of(ONE_BUCKET)
    residual = feedback.residual(run, CPU)
    assert residual.dtype == torch.float32
    assert not residual.any()
    assert feedback.residual(run, CPU) is residual


def test_values_stay_with_their_parameter_when_runs_change_and_come_back() -> None:
    feedback, first, second = ErrorFeedback(), runs_of(ONE_BUCKET), runs_of(OTHER_BUCKETS)
    assert {run.parts for run in first}.isdisjoint(run.parts for run in second)
    fill(feedback, first, seed=1)
    written = residuals(feedback, first)
    assert_same(residuals(feedback, second), written)

    fill(feedback, second, seed=2)
    written = residuals(feedback, second)
    assert_same(residuals(feedback, first), written)  # put together anew: not what it held when it was left


def test_a_run_of_which_a_part_has_left_does_not_come_back_with_what_it_held() -> None:
    feedback = ErrorFeedback()
    whole, alone = runs_of(ONE_BUCKET), runs_of([[PARAMETERS[0]]])
    fill(feedback, whole, seed=1)
    before = residuals(feedback, whole)
    fill(feedback, alone, seed=2)  # "a" leaves; "b" and "c" stay where they are
    after = residuals(feedback, alone)
    assert_same(residuals(feedback, whole), {**before, **after})


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_runs_keeps_every_value(seed: int) -> None:
    rng = random.Random(seed)
    cuts = [runs_of(ONE_BUCKET), runs_of(OTHER_BUCKETS), runs_of([[spec] for spec in PARAMETERS])]
    feedback = ErrorFeedback()
    written: dict[tuple[str, int], Tensor] = {}
    for step in range(8):
        for run in rng.choice(cuts):
            if rng.random() < 0.7:
                fill(feedback, [run], seed=100 * step)
                written.update(residuals(feedback, [run]))
    known = residuals(feedback, rng.choice(cuts))
    assert_same({key: known[key] for key in written}, written)
    if rng.random() < 0.5:
        feedback = reloaded(feedback)
    assert_same(residuals(feedback, rng.choice(cuts)), known)


def reloaded(feedback: ErrorFeedback) -> ErrorFeedback:
    fresh = ErrorFeedback()
    fresh.load_state_dict(feedback.state_dict())
    return fresh


@pytest.mark.parametrize("buckets", [ONE_BUCKET, OTHER_BUCKETS], ids=["same runs", "other runs"])
def test_state_survives_a_checkpoint(buckets: list[list[ParameterSpec]]) -> None:
    feedback = ErrorFeedback()
    fill(feedback, runs_of(ONE_BUCKET), seed=1)
    fresh = reloaded(feedback)
    assert fresh.state_dict().keys() == feedback.state_dict().keys()  # also before anybody has asked for a residual
    assert_same(residuals(fresh, runs_of(buckets)), residuals(feedback, runs_of(ONE_BUCKET)))


def test_the_state_is_a_copy_and_knows_names_with_any_character() -> None:
    spec = ParameterSpec("blocks:0.weight", 100, 10)
    (layout,) = codec_slices([spec], 1, 600, Grain(block=64), {spec.name: 0})
    run = layout.run(0, layout.numel)
    feedback = ErrorFeedback()
    feedback.residual(run, CPU).fill_(1.0)
    state = feedback.state_dict()
    assert list(state) == ["0:blocks:0.weight"]
    feedback.residual(run, CPU).fill_(2.0)
    assert torch.equal(state["0:blocks:0.weight"], torch.ones(100))
    feedback.load_state_dict(state)
    feedback.residual(run, CPU).fill_(3.0)
    assert torch.equal(state["0:blocks:0.weight"], torch.ones(100))


def test_a_loaded_state_replaces_all_and_parts_of_another_size_start_at_zero() -> None:
    feedback, runs = ErrorFeedback(), runs_of(ONE_BUCKET)
    fill(feedback, runs, seed=1)
    first = next(key for key in feedback.state_dict())
    feedback.load_state_dict({first: torch.ones(1)})  # saved with another number of ranks
    assert all(not residual.any() for residual in residuals(feedback, runs).values())


def test_what_is_kept_leaves_out_the_padding() -> None:
    feedback, run = ErrorFeedback(), next(run for run in runs_of(ONE_BUCKET) if run.padding.numel())
    parts = [element for part in run.parts for element in range(part.offset, part.offset + part.numel)]
    padding = torch.ones(run.numel, dtype=torch.bool)
    padding[torch.tensor(parts) - run.start] = False
    assert padding.any()
    feedback.keep(run, torch.full((run.numel,), 3.0))
    assert torch.equal(feedback.residual(run, CPU), torch.where(padding, 0.0, 3.0))


def test_a_residual_may_be_told_to_stay() -> None:
    feedback, (run, *_) = ErrorFeedback(), runs_of(ONE_BUCKET)
    feedback.keep(run, torch.full((run.numel,), 3.0))
    before = feedback.residual(run, CPU).clone()
    feedback.keep(run, torch.full((run.numel,), torch.nan), unless=torch.tensor(True))
    assert torch.equal(feedback.residual(run, CPU), before)
    feedback.keep(run, torch.full((run.numel,), 5.0), unless=torch.tensor(False))
    assert torch.equal(feedback.residual(run, CPU), before / 3 * 5)
