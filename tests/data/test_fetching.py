"""Batches of map-style and iterable datasets, and what is random in them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from lightning_hpc.data.fetching import (
    BatchSource,
    ExhaustedError,
    IterableFetcher,
    MapFetcher,
    epoch_of,
    set_epoch,
)
from lightning_hpc.data.seeding import GeneratorStates, KeptGenerators
from tests.data.datasets import (
    Augmented,
    AugmentedTogether,
    FetchedTogether,
    Numbers,
    Parts,
    as_list,
    assert_same,
    draws,
)


def map_fetcher(dataset: Dataset[Any], collate: Any = as_list, auto_collation: bool = True) -> MapFetcher:
    return MapFetcher(BatchSource(dataset, collate, auto_collation, False), collate)


def iterable_fetcher(dataset: IterableDataset[Any], drop_last: bool = False, single: bool = False) -> IterableFetcher:
    return IterableFetcher(BatchSource(dataset, as_list, not single, drop_last), as_list)


def test_samples_are_fetched_one_by_one_or_together() -> None:
    with KeptGenerators():
        for dataset in (Numbers(5), FetchedTogether(5)):
            assert [int(sample[0]) for sample in map_fetcher(dataset)([3, 1], 0)] == [3, 1]
        assert int(map_fetcher(Numbers(5), auto_collation=False)(4, 0)[0]) == 4


@pytest.mark.parametrize("index", [[], (), set()])
def test_an_empty_batch(index: Any) -> None:
    with KeptGenerators():
        for dataset in (Numbers(5), FetchedTogether(5)):
            assert map_fetcher(dataset)(index, 0) == []


def test_a_sample_is_augmented_alike_wherever_it_is_read_and_differently_in_each_epoch() -> None:
    with KeptGenerators():
        fetch = map_fetcher(Augmented(9))
        one, other = fetch([1, 2, 3], 0), fetch([3, 7], 0)
        assert repr(one[2]) == repr(other[0])
        assert repr(fetch([3], 1)[0]) != repr(other[0])
        assert repr(one[0][1:]) != repr(one[1][1:])


def test_a_batch_that_is_fetched_together_is_augmented_by_its_first_index() -> None:
    with KeptGenerators():
        fetch = map_fetcher(AugmentedTogether(9))
        assert repr(fetch([1, 2, 3], 0)) == repr(fetch([1, 2, 3], 0))
        assert repr(fetch([2, 3], 0)) != repr(fetch([1, 2, 3], 0)[1:])


def test_a_batch_is_read_again_only_where_something_was_drawn_and_leaves_no_trace() -> None:
    with KeptGenerators():
        states, reads = GeneratorStates(), []

        def collate(samples: Any) -> Any:
            reads.append(len(samples))
            return samples

        plain, drawing = map_fetcher(Numbers(9), collate), map_fetcher(Augmented(9), draws_after(collate))
        for fetch, expected in ((plain, [2, 1]), (drawing, [2, 2, 1])):
            reads.clear()
            fetch([1, 2], 0)
            fetch([3], 0)
            assert reads == expected
            assert fetch is drawing or not states.have_changed()


def draws_after(collate: Any) -> Any:
    def collate_and_draw(samples: Any) -> Any:
        torch.rand(1)
        return collate(samples)

    return collate_and_draw


def test_a_collate_function_that_draws_is_keyed_too() -> None:
    with KeptGenerators():
        dataset = TensorDataset(torch.arange(8.0))
        one, other = map_fetcher(dataset, draws), map_fetcher(dataset, draws)
        one([1, 2], 0)
        assert_same(one([3, 4], 0), other([3, 4], 0))


def test_the_trainers_generators_go_on_as_if_nothing_was_drawn() -> None:
    with KeptGenerators():
        states = GeneratorStates()
        fetch = MapFetcher(BatchSource(Augmented(9), as_list, True, False), as_list, keeps_generators=True)
        for index in range(3):
            fetch([index], 0)
            assert not states.have_changed()


def test_an_iterable_dataset_ends_with_what_is_left() -> None:
    fetch = iterable_fetcher(Parts(5))
    sizes = [len(fetch([None] * 2)) for _ in range(3)]
    assert sizes == [2, 2, 1]
    for _ in range(2):
        with pytest.raises(ExhaustedError):
            fetch([None] * 2)


def test_an_iterable_datasets_last_batch_can_be_dropped() -> None:
    fetch = iterable_fetcher(Parts(5), drop_last=True)
    assert [len(fetch([None] * 2)) for _ in range(2)] == [2, 2]
    with pytest.raises(ExhaustedError):
        fetch([None] * 2)


def test_single_samples_of_an_iterable_dataset() -> None:
    fetch = iterable_fetcher(Parts(2), single=True)
    assert [int(fetch(None)[0]) for _ in range(2)] == [0, 1]
    with pytest.raises(ExhaustedError):
        fetch(None)


class Failing(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1
        raise ValueError("planted")


def test_an_iterable_dataset_that_has_raised_is_over() -> None:
    fetch = iterable_fetcher(Failing())
    assert fetch([None]) == [1]
    with pytest.raises(ValueError, match="planted"):
        fetch([None])
    with pytest.raises(ExhaustedError):
        fetch([None])


class Epochs(Numbers):
    epoch = 0
    calls = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.calls += 1


def test_a_dataset_is_told_its_epoch_when_it_changes() -> None:
    dataset = Epochs(3)
    assert epoch_of(dataset) == 0
    for epoch in (0, 4, 4, None, 5):
        set_epoch(dataset, epoch)
    assert (dataset.epoch, dataset.calls) == (5, 2)


def test_a_dataset_that_takes_or_shows_no_epoch_is_left_alone() -> None:
    dataset = Numbers(3)
    assert epoch_of(dataset) is None
    set_epoch(dataset, 3)
    dataset.epoch = 5  # type: ignore[attr-defined]
    assert epoch_of(dataset) is None


def transformed(dataset: Dataset[Any], transform: Any, auto_collation: bool = True) -> BatchSource:
    return BatchSource(dataset, as_list, auto_collation, False, transform)


def first_twice(sample: Any) -> int:
    return 2 * int(sample[0])


def test_a_transform_is_applied_to_each_sample_of_any_kind_of_dataset() -> None:
    with KeptGenerators():
        for dataset in (Numbers(5), FetchedTogether(5)):
            assert MapFetcher(transformed(dataset, first_twice), as_list)([3, 1], 0) == [6, 2]
        assert MapFetcher(transformed(Numbers(5), first_twice, auto_collation=False), as_list)(4, 0) == 8
    assert IterableFetcher(transformed(Parts(3), first_twice), as_list)([None] * 3) == [0, 2, 4]


def test_a_transform_draws_by_the_sample_too() -> None:
    def draw(sample: Any) -> float:
        return float(torch.rand(()))

    with KeptGenerators():
        one, other = (MapFetcher(transformed(Numbers(9), draw), as_list) for _ in range(2))
        assert one([1, 2, 3], 0)[2] == other([3], 0)[0]
