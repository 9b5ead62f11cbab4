import itertools
from collections.abc import Collection

import pytest
import torch
from torch import Tensor, nn

from lightning_hpc.memory import CheckpointedBlocks, DryRun, SavedActivations, find_blocks
from tests.memory.block_models import MODELS, equal, inputs, make, train


def alive_anyway(model: nn.Module, x: Tensor) -> list[Tensor]:
    return [*model.parameters(), *model.buffers(), x]


def measured_peak(model: nn.Module, x: Tensor, blocks: CheckpointedBlocks, checkpointed: Collection[str]) -> int:
    blocks.checkpoint(checkpointed)
    with SavedActivations(alive_anyway(model, x)) as saved, blocks.watched_by(saved):
        train(model, x)
    return saved.peak_bytes


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_every_choice_is_known_to_the_byte_and_the_best_is_chosen(name: str) -> None:
    model, x = make(name), inputs(name)
    with CheckpointedBlocks(find_blocks(model).modules) as blocks:
        with DryRun(blocks, alive_anyway(model, x)) as dry_run:
            train(model, x)
        assert dry_run.is_complete
        choices = [
            choice for count in range(len(blocks.names) + 1) for choice in itertools.combinations(blocks.names, count)
        ]
        measured = {choice: measured_peak(model, x, blocks, choice) for choice in choices}
        predicted = {choice: dry_run.model().peak_bytes(choice) for choice in choices}
        assert predicted == measured
        seconds = dict(zip(blocks.names, dry_run.seconds(), strict=True))
        cost = {choice: sum(seconds[block] for block in choice) for choice in choices}
        for budget in sorted(set(measured.values())):
            plan = dry_run.choose(budget)
            assert measured[plan.blocks] == plan.peak_bytes <= budget
            best = min(cost[choice] for choice in choices if measured[choice] <= budget)
            assert plan.extra_seconds == pytest.approx(best)


def test_autocast_is_predicted_to_the_byte() -> None:
    model, x = make("attention"), inputs("attention")

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()

    with CheckpointedBlocks(find_blocks(model).modules) as blocks:
        with DryRun(blocks, alive_anyway(model, x)) as dry_run:
            step()
        for choice in ((), blocks.names[:2], blocks.names):
            blocks.checkpoint(choice)
            with SavedActivations(alive_anyway(model, x)) as saved, blocks.watched_by(saved):
                step()
            assert dry_run.model().peak_bytes(choice) == saved.peak_bytes


def test_the_measured_step_is_bitwise_that_of_a_plain_model() -> None:
    plain, other = make("dropout"), make("dropout")
    x = inputs("dropout")
    torch.manual_seed(1)
    expected = (train(plain, x), torch.get_rng_state())
    torch.manual_seed(1)
    with CheckpointedBlocks(find_blocks(other).modules) as blocks, DryRun(blocks, alive_anyway(other, x)):
        assert equal((train(other, x), torch.get_rng_state()), expected)


def test_it_needs_no_more_than_a_step_with_all_blocks_checkpointed() -> None:
    model, x = make("residual"), inputs("residual")
    with CheckpointedBlocks(find_blocks(model).modules) as blocks:
        with DryRun(blocks, alive_anyway(model, x)) as dry_run:
            train(model, x)
        assert dry_run.saved.peak_bytes == measured_peak(model, x, blocks, blocks.names)


def test_a_step_without_backward_is_not_complete() -> None:
    model, x = make("residual"), inputs("residual")
    with CheckpointedBlocks(find_blocks(model).modules) as blocks, DryRun(blocks, []) as dry_run:
        model(x)
    assert not dry_run.is_complete
    assert dry_run.seconds() == [0.0] * 4


def test_frozen_blocks_cost_nothing_and_are_left_alone() -> None:
    model, x = make("residual"), inputs("residual")
    model[0].requires_grad_(False)
    model[1][0].requires_grad_(False)
    with CheckpointedBlocks(find_blocks(model).modules) as blocks:
        with DryRun(blocks, alive_anyway(model, x)) as dry_run:
            train(model, x)
        assert dry_run.seconds()[0] == 0.0
        assert "1.0" not in dry_run.choose(dry_run.saved.peak_bytes).blocks
        assert dry_run.model().peak_bytes(()) == measured_peak(model, x, blocks, ())
