"""Batches of all ranks together: budget and padding, and the cuts that give each rank as many of them."""

import hashlib
import json

import numpy as np
import pytest

from lightning_hpc.data.token_plan import TokenPlan, cut_last_steps, fill_last_step
from tests.data.lengths import MEDIAN, log_normal


@pytest.mark.parametrize("budget", [20 * MEDIAN, 80 * MEDIAN])
@pytest.mark.parametrize("sigma", [0.25, 0.5, 1.0, 1.5, 2.0])
def test_padding_of_log_normal_lengths_is_at_most_3_percent(sigma: float, budget: int) -> None:
    for count in (10_000, 50_000):
        lengths = log_normal(count, sigma, budget)
        plan = TokenPlan(lengths, budget, budget, shuffle=True)
        assert plan.num_batches <= 1.02 * TokenPlan(lengths, budget, budget, shuffle=False).num_batches
        for epoch in range(2):
            order, edges = plan.batches(0, epoch)
            padded = np.diff(edges) * np.maximum.reduceat(lengths[order], edges[:-1])
            assert padded.max() <= budget
            assert 1 - lengths.sum() / padded.sum() <= 0.03


@pytest.mark.parametrize("length", [0, 1, 7, 512])
def test_equal_lengths_fill_every_batch(length: int) -> None:
    _, edges = TokenPlan(np.full(80, length), 4096, 8, shuffle=True).batches(0, 0)
    assert np.diff(edges).tolist() == [8] * 10


def test_a_seed_means_the_same_plan_in_every_release() -> None:
    # If this has to change, so has the "plan" in the fingerprint, or old states would be continued wrongly.
    order, _ = TokenPlan(7 * np.arange(300) % 40, 100, 100, shuffle=True).batches(seed=5, epoch=2)
    digest = hashlib.sha256(json.dumps(order.tolist()).encode()).hexdigest()
    assert digest == "924a6e328a197ebffa37fb7abd610ff7156e13b1cf724e26afa178ed76e09d25"


def test_a_cut_keeps_all_edges_and_changes_no_more_last_steps_than_it_must() -> None:
    generator = np.random.default_rng(7)
    for _ in range(500):
        count, ranks = int(generator.integers(1, 40)), int(generator.integers(1, 10))
        largest = int(generator.integers(1, 7))
        edges = np.concatenate(([0], np.cumsum(generator.integers(1, largest + 1, count))))
        samples, steps = int(edges[-1]), -(-count // ranks)
        cut = cut_last_steps(edges, ranks)
        assert len(cut) - 1 == min(steps * ranks, samples)
        assert (np.diff(cut) > 0).all()
        assert set(edges) <= set(cut)
        firsts = [step * ranks for step in range(steps)]  # the first batch of each step
        kept = max((first for first in firsts if samples - edges[first] >= steps * ranks - first), default=0)
        assert cut[: kept + 1].tolist() == edges[: kept + 1].tolist()


def test_the_largest_batches_are_cut_into_equal_parts() -> None:
    assert cut_last_steps(np.array([0, 2, 11, 13]), 6).tolist() == [0, 2, 4, 6, 8, 11, 13]
    assert cut_last_steps(np.array([0, 1, 9]), 3).tolist() == [0, 1, 5, 9]


@pytest.mark.parametrize(
    ("count", "ranks", "expected"),
    [(6, 3, [0, 1, 2, 3, 4, 5]), (5, 3, [0, 1, 2, 3, 4, 0]), (1, 4, [0, 0, 0, 0]), (0, 3, [])],
)
def test_what_a_last_step_lacks_is_repeated_from_the_first_batches(count: int, ranks: int, expected: list[int]) -> None:
    assert fill_last_step(count, ranks).tolist() == expected
