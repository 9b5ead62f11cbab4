"""Samplers in place of a user's: nothing of what the user's loader says gets lost."""

from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from lightning_hpc.data.sampler_choice import SamplerChoice
from lightning_hpc.data.sampling import ElasticSampler
from tests.data.datasets import Numbers, Parts

NUMBERS = Numbers(10)


def choose(is_training: bool = True, dataset: Any = NUMBERS, **kwargs: Any) -> dict[str, Any]:
    return SamplerChoice(None, seed=1).instead_of(DataLoader(dataset, **kwargs), is_training=is_training)


@pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param({"batch_size": 4, "shuffle": True, "drop_last": True}, id="by its size"),
        pytest.param({"batch_sampler": BatchSampler(RandomSampler(NUMBERS), 4, True)}, id="the user's batch sampler"),
    ],
)
def test_a_shuffled_loader_gets_a_sampler_that_can_go_on(kwargs: dict[str, Any]) -> None:
    chosen = choose(**kwargs)
    assert isinstance(chosen["sampler"], ElasticSampler)
    assert sorted(chosen["sampler"]) == list(range(10))
    assert list(chosen["sampler"]) != list(range(10))
    assert (chosen["batch_size"], chosen["drop_last"]) == (4, True)


def test_an_ordered_loader_stays_ordered() -> None:
    assert list(choose(batch_size=4)["sampler"]) == list(range(10))


def test_single_samples_stay_single() -> None:
    assert choose(batch_size=None)["batch_size"] is None
    assert choose(is_training=False, batch_size=None)["batch_size"] is None


def test_samplers_of_the_users_own_stay() -> None:
    weighted = WeightedRandomSampler([1.0] * 10, 10)
    assert choose(batch_size=2, sampler=weighted)["sampler"] is weighted
    batches = [[0, 1], [5]]
    assert choose(batch_sampler=batches) == {"batch_sampler": batches}
    with_own_order = RandomSampler(NUMBERS, replacement=True)
    assert choose(batch_sampler=BatchSampler(with_own_order, 3, False))["sampler"] is with_own_order


def test_evaluation_keeps_order_and_size() -> None:
    assert choose(is_training=False, batch_size=4) == {"batch_size": 4}
    batches = BatchSampler(SequentialSampler(NUMBERS), 3, False)
    assert choose(is_training=False, batch_sampler=batches) == {"batch_size": 3}
    assert choose(is_training=False, batch_size=4, drop_last=True)["drop_last"]


def test_iterable_datasets_have_sizes_only() -> None:
    assert choose(dataset=Parts(4), batch_size=3) == {"batch_size": 3, "drop_last": False}
