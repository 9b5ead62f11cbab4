"""The epoch after the present one is guessed as it comes, and guessing leaves no trace."""

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler

from lightning_hpc.data.lookahead import guess_next_epoch
from lightning_hpc.data.sampling import ElasticSampler, EvenBatchSampler
from tests.data.modules import Drawn


class OwnBatches(BatchSampler):
    pass


def test_the_guess_is_the_next_epoch_of_a_sampler_that_takes_epochs() -> None:
    for shuffle in (False, True):
        sampler = ElasticSampler(Drawn(), 2, 1, shuffle)
        loader = DataLoader(Drawn(), batch_size=4, sampler=sampler)
        sampler.set_epoch(6)
        guess = guess_next_epoch(loader)
        assert guess is not None
        assert not guess.holds(loader)
        sampler.set_epoch(7)
        assert guess.holds(loader)
        assert list(guess.indices) == list(loader.batch_sampler)  # type: ignore[arg-type]
        sampler.set_epoch(8)
        assert not guess.holds(loader)


def test_guessing_changes_neither_sampler_nor_generators() -> None:
    generator = torch.Generator().manual_seed(3)
    even = EvenBatchSampler(ElasticSampler(Drawn(), 2, 0, False, repeats=False), 4)
    loaders: list[DataLoader[Any]] = [
        DataLoader(Drawn(), batch_size=4, shuffle=True),
        DataLoader(Drawn(), batch_size=4, shuffle=True, generator=generator),
        DataLoader(Drawn(), batch_size=None, shuffle=True),
        DataLoader(Drawn(), batch_sampler=even),
    ]
    for loader in loaders:
        sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler.sampler  # type: ignore[attr-defined]
        before = torch.get_rng_state(), generator.get_state(), dict(vars(sampler))
        guess_next_epoch(loader)
        assert torch.equal(before[0], torch.get_rng_state())
        assert torch.equal(before[1], generator.get_state())
        assert before[2] == vars(sampler)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Drawn(), sampler=SubsetRandomSampler(range(9))),
        DataLoader(Drawn(), batch_sampler=OwnBatches(range(9), 2, False)),
        DataLoader(Drawn(), sampler=RandomSampler(Drawn(), generator=torch.Generator())),
    ],
)
def test_what_nobody_can_know_is_not_guessed(loader: DataLoader[Any]) -> None:
    assert guess_next_epoch(loader) is None


def test_the_order_is_that_of_the_batch_sampler_where_one_is_given() -> None:
    batch_samplers: list[Any] = [
        BatchSampler(ElasticSampler(Drawn(), 2, 1), 4, False),
        EvenBatchSampler(ElasticSampler(Drawn(), 2, 1, repeats=False), 4),
    ]
    for batch_sampler in batch_samplers:
        loader: DataLoader[Any] = DataLoader(Drawn(), batch_sampler=batch_sampler)
        guess = guess_next_epoch(loader)
        assert guess is not None
        batch_sampler.sampler.set_epoch(1)
        assert guess.holds(loader)
        assert list(guess.indices) == list(batch_sampler)
    assert guess_next_epoch(DataLoader(Drawn(), batch_sampler=BatchSampler(SubsetRandomSampler([3]), 2, False))) is None
