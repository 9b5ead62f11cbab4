"""Orders of several ranks: left anywhere, gone on with on any number of ranks; evaluation reads each sample once."""

import itertools
import math
import random
import warnings
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from lightning_hpc.data.sampling import ElasticSampler, EvenBatchSampler


def in_turn(ranks: list[list[int]]) -> list[int]:
    """What the ranks read, in the order of the epoch."""
    return [each for row in itertools.zip_longest(*ranks) for each in row if each is not None]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_is_distributed_sampler_where_nothing_is_resumed(shuffle: bool, drop_last: bool) -> None:
    for numel, ranks in itertools.product((1, 5, 53, 64), (1, 2, 3, 4, 7)):
        for rank in range(ranks):
            arguments: Any = (range(numel), ranks, rank, shuffle, 3, drop_last)
            ours, theirs = ElasticSampler(*arguments), DistributedSampler[int](*arguments)
            for epoch in range(2):
                ours.set_epoch(epoch)
                theirs.set_epoch(epoch)
                assert list(ours) == list(theirs)
                assert len(ours) == len(theirs)


def test_any_chain_of_numbers_of_ranks_reads_the_order_of_one() -> None:
    generator = random.Random(5)
    for case in range(60):
        numel, seed = generator.randrange(1, 200), case
        whole = list(ElasticSampler(range(numel), 1, 0, seed=seed))
        read: list[int] = []
        state = ElasticSampler(range(numel), 1, 0, seed=seed).state_dict()
        for _ in range(4):
            ranks = generator.randrange(1, 7)
            samplers = [ElasticSampler(range(numel), ranks, rank, seed=seed + 1) for rank in range(ranks)]
            for sampler in samplers:
                sampler.load_state_dict(state)
            each = generator.randrange(0, max(1, (numel - len(read)) // ranks + 1))
            read += in_turn([list(itertools.islice(sampler, each)) for sampler in samplers])
            states = [sampler.state_dict(each) for sampler in samplers]
            assert all(other == states[0] for other in states)
            state = states[0]
        last = ElasticSampler(range(numel), 1, 0)
        last.load_state_dict(state)
        assert len(last) == numel - len(read)
        assert read + list(last) == whole


def test_a_resumed_epoch_is_followed_by_a_whole_one_whether_announced_or_not() -> None:
    for announced in (False, True):
        sampler = ElasticSampler(range(20), 1, 0, shuffle=False)
        sampler.load_state_dict(sampler.state_dict(15))
        sampler.set_epoch(0)  # its own epoch changes nothing
        assert list(sampler) == list(range(15, 20))
        assert sampler.state_dict(5)["start"] == 20  # still the place of the resumed epoch
        if announced:
            sampler.set_epoch(1)
        assert list(sampler) == list(range(20))


def test_a_state_of_other_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="53 samples, but there are 54"):
        ElasticSampler(range(54), 1, 0).load_state_dict(ElasticSampler(range(53), 1, 0).state_dict())


def test_evaluation_reads_each_sample_once_if_that_is_possible_in_as_many_batches_on_every_rank() -> None:
    for numel, ranks, batch_size in itertools.product(range(1, 30), range(1, 6), (1, 2, 3, 8)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batches = [
                list(EvenBatchSampler(ElasticSampler(range(numel), ranks, rank, False, repeats=False), batch_size))
                for rank in range(ranks)
            ]
        expected = math.ceil(math.ceil(numel / ranks) / batch_size)
        assert {len(own) for own in batches} == {expected}
        read = [index for own in batches for batch in own for index in batch]
        repeated = max(0, expected * ranks - numel)  # a batch has a sample
        assert len(read) == numel + repeated
        assert set(read) == set(range(numel))
        assert len(caught) == (repeated > 0)
        assert all(0 < len(batch) <= batch_size for own in batches for batch in own)


def test_with_fewer_samples_than_ranks_each_rank_has_a_batch_and_rank_0_warns() -> None:
    samplers = [ElasticSampler(range(3), 5, rank, shuffle=False, repeats=False) for rank in range(5)]
    with pytest.warns(UserWarning, match="2 of 3 samples count twice, as 5 ranks"):
        batches = [list(EvenBatchSampler(sampler, 4)) for sampler in samplers]
    assert batches == [[[0]], [[1]], [[2]], [[0]], [[1]]]
    assert list(EvenBatchSampler(ElasticSampler(range(0), 2, 1, False, repeats=False), 4)) == []
