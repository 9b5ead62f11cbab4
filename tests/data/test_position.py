"""Places in an epoch: of constant size, refused where samples would be lost."""

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from lightning_hpc.data.batching import TokenBudgetBatchSampler
from lightning_hpc.data.loader import SharedMemoryLoader
from lightning_hpc.data.position import Position, go_to, resumable_of
from lightning_hpc.data.sampling import ElasticSampler
from tests.data.modules import Drawn, Stream

LENGTHS = [1 + index * 7 % 13 for index in range(53)]


def samples(loader: Any) -> list[Any]:
    return [torch.as_tensor(batch[0]).tolist() for batch in loader]


def loaders(num_workers: int) -> dict[str, SharedMemoryLoader[Any]]:
    def make(**kwargs: Any) -> SharedMemoryLoader[Any]:
        return SharedMemoryLoader(kwargs.pop("dataset", Drawn()), num_workers=num_workers, **kwargs)

    return {
        "elastic": make(batch_size=4, sampler=ElasticSampler(Drawn(), 1, 0)),
        "tokens": make(batch_sampler=TokenBudgetBatchSampler(LENGTHS, 40)),
        "generator": make(batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5)),
        "stream": make(batch_size=4, dataset=Stream()),
        "single": make(batch_size=None, sampler=ElasticSampler(Drawn(20), 1, 0), dataset=Drawn(20)),
    }


@pytest.mark.parametrize("kind", ["elastic", "tokens", "generator", "stream", "single"])
def test_every_place_goes_on_exactly_and_whole_epochs_follow(kind: str) -> None:
    whole = loaders(0)[kind]
    states, expected = [whole.state_dict()], []
    for epoch in range(2):
        iterator = iter(whole)
        for batch in iterator:
            expected.append(torch.as_tensor(batch[0]).tolist())
            states.append(whole.state_dict())
        assert epoch or expected
    count = len(expected) // 2
    for place in range(1, count):
        other = loaders(0)[kind]
        other.load_state_dict(pickle.loads(pickle.dumps(states[place])))
        assert samples(other) == expected[place:count]
        assert samples(other) == expected[count:]
    for place in (1, count // 2, count - 1):
        other = loaders(2 if kind != "stream" else 0)[kind]
        other.load_state_dict(states[place])
        assert samples(other) == expected[place:count]
        other.close()


def test_a_state_is_small_and_taking_it_reads_no_order() -> None:
    class Counts(ElasticSampler):
        orders = 0

        def _order(self) -> list[int]:
            Counts.orders += 1
            return super()._order()

    sizes = []
    for numel in (100, 1_000_000):
        loader: SharedMemoryLoader[Any] = SharedMemoryLoader(
            Drawn(numel), batch_size=4, sampler=Counts(Drawn(numel), 1, 0)
        )
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        before = Counts.orders
        state = loader.state_dict()
        loader.load_state_dict(state)
        assert Counts.orders == before
        sizes.append(len(pickle.dumps(state)))
    assert max(sizes) < 8_000
    assert abs(sizes[0] - sizes[1]) < 64


def test_an_epoch_that_is_announced_after_iter_holds_unless_another_is_gone_on_with() -> None:
    for num_workers in (0, 1):
        loader: SharedMemoryLoader[Any] = SharedMemoryLoader(
            Drawn(), batch_size=4, sampler=(sampler := ElasticSampler(Drawn(), 1, 0)), num_workers=num_workers
        )
        sampler.set_epoch(3)
        expected = samples(loader)
        sampler.set_epoch(0)
        iterator = iter(loader)
        sampler.set_epoch(3)
        assert samples(iterator) == expected
        state = loader.state_dict() | {"is_over": False}
        half = iter(loader)
        for _ in range(5):
            next(half)
        state = loader.state_dict()
        loader.load_state_dict(state)
        iterator = iter(loader)
        sampler.set_epoch(4)  # Lightning counts an epoch that max_steps has stopped
        assert samples(iterator) == expected[5:]
        loader.close()


def test_a_place_behind_an_epoch_is_the_beginning_of_the_next() -> None:
    loader = loaders(0)["elastic"]
    samples(loader)
    other: SharedMemoryLoader[Any] = SharedMemoryLoader(
        Drawn(), batch_size=4, sampler=(sampler := ElasticSampler(Drawn(), 1, 0, seed=9))
    )
    other.load_state_dict(loader.state_dict())
    assert (sampler.epoch, sampler.seed) == (1, 0)
    assert len(samples(other)) == 14


def test_other_numbers_of_workers_or_ranks_are_refused_where_samples_would_be_lost() -> None:
    stream: SharedMemoryLoader[Any] = SharedMemoryLoader(Stream(), batch_size=4, num_workers=2)
    next(iter(stream))
    state = stream.state_dict()
    stream.close()
    with pytest.raises(ValueError, match="num_workers=2"):
        SharedMemoryLoader(Stream(), batch_size=4, num_workers=1).load_state_dict(state)

    def of(ranks: int) -> SharedMemoryLoader[Any]:
        return SharedMemoryLoader(Drawn(), batch_size=4, sampler=DistributedSampler(Drawn(), ranks, 0))

    next(iter(two := of(2)))
    with pytest.raises(ValueError, match="ranks=2"):
        of(4).load_state_dict(two.state_dict())
    of(2).load_state_dict(two.state_dict())


def test_states_of_others_are_refused() -> None:
    with pytest.raises(ValueError, match="not saved by a SharedMemoryLoader"):
        Position.from_dict({"epoch": 1})
    with pytest.raises(ValueError, match="this loader has none"):
        go_to(DataLoader(Drawn()), {"epoch": 0})


def test_states_without_a_count_are_not_taken_for_places() -> None:
    class Torchdata(Sampler[int]):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    assert resumable_of(DataLoader(Drawn(), sampler=Torchdata())) is None
    assert resumable_of(DataLoader(Drawn(), batch_size=4, sampler=ElasticSampler(Drawn(), 1, 0)))[1] == 4  # type: ignore[index]
