"""Batches by tokens: budget, equal numbers on all ranks, positions that survive any change of ranks."""

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import numpy.typing as npt
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_hpc.data.batching import TokenBudgetBatchSampler
from tests.data.lengths import log_normal
from tests.helpers import run_ranks

Batches = list[list[int]]


def samplers(
    lengths: Sequence[int] | npt.NDArray[np.int64], max_tokens: int, ranks: int, **kwargs: Any
) -> list[TokenBudgetBatchSampler]:
    return [
        TokenBudgetBatchSampler(lengths, max_tokens, num_replicas=ranks, rank=rank, **kwargs) for rank in range(ranks)
    ]


def steps(ranks: list[TokenBudgetBatchSampler]) -> list[Batches]:
    """The batches of all ranks by step; fails where a rank has more of them than another."""
    return [list(step) for step in zip(*ranks, strict=True)]


def flat(nested: list[Batches]) -> list[int]:
    return [sample for step in nested for batch in step for sample in batch]


def digest(sequence: list[int]) -> str:
    return hashlib.sha256(json.dumps(sequence).encode()).hexdigest()


def test_each_sample_once_within_the_budget_and_as_many_batches_on_every_rank() -> None:
    generator = np.random.default_rng(3)
    for case in range(60):
        count, budget = int(generator.integers(60, 400)), int(generator.integers(300, 3000))
        lengths = generator.integers(0, budget // 3, count)
        for ranks in range(1, 10):
            group = samplers(lengths, budget, ranks, seed=case, shuffle=bool(case % 3))
            epoch = steps(group)
            assert {len(sampler) for sampler in group} == {len(epoch)}
            assert sorted(flat(epoch)) == list(range(count))
            assert all(len(batch) * lengths[batch].max() <= budget for step in epoch for batch in step)
            assert all(batch for step in epoch for batch in step)


def test_the_number_of_samples_can_be_limited() -> None:
    lengths = log_normal(1000, 1.0, 4000)
    batches = list(TokenBudgetBatchSampler(lengths, 4000, max_samples=6))
    assert max(map(len, batches)) == 6
    assert sorted(flat([batches])) == list(range(1000))


def test_no_samples_no_batches() -> None:
    assert [list(sampler) for sampler in samplers([], 10, 3)] == [[], [], []]


@pytest.mark.parametrize(
    "convert",
    [list, torch.tensor, lambda lengths: lengths.astype(np.int16), lambda lengths: torch.tensor(lengths).short()],
)
def test_lengths_may_be_a_list_an_array_or_a_tensor(convert: Callable[[Any], Any]) -> None:
    lengths = log_normal(300, 0.5, 4000)
    sampler, other = TokenBudgetBatchSampler(lengths, 4000), TokenBudgetBatchSampler(convert(lengths), 4000)
    assert list(sampler) == list(other)
    other.load_state_dict(sampler.state_dict())


def test_epochs_and_seeds_differ_in_composition_and_order_but_not_in_number() -> None:
    lengths = log_normal(5000, 0.5, 16000)
    compositions, counts = [], set()
    for seed, epoch in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        sampler = TokenBudgetBatchSampler(lengths, 16000, seed=seed)
        sampler.set_epoch(epoch)
        batches = list(sampler)
        counts.add(len(batches))
        compositions.append({tuple(sorted(batch)) for batch in batches})
        longest = [int(lengths[batch].max()) for batch in batches]
        assert abs(np.corrcoef(longest, range(len(longest)))[0, 1]) < 0.5
    assert len(counts) == 1
    for index, composition in enumerate(compositions):
        for other in compositions[:index]:
            assert len(composition & other) <= 0.05 * len(composition)


def test_without_shuffling_epochs_are_equal_and_the_longest_come_first() -> None:
    lengths = log_normal(1000, 0.5, 4000)
    sampler = TokenBudgetBatchSampler(lengths, 4000, shuffle=False)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) == first
    assert flat([first]) == np.argsort(-lengths, kind="stable").tolist()


def run_chain(
    lengths: npt.NDArray[np.int64], budget: int, chain: list[tuple[int, int]], **kwargs: Any
) -> tuple[list[int], int, dict[str, Any]]:
    """Consumes some steps with each number of ranks in turn; returns the samples, the steps and the last state."""
    seen: list[int] = []
    taken, state = 0, None
    for ranks, consumed in chain:
        group = samplers(lengths, budget, ranks, **kwargs)
        for sampler in group:
            sampler.set_epoch(3)
            if state is not None:
                sampler.load_state_dict(state)
        done = steps(group)[:consumed]
        seen += flat(done)
        taken += len(done)
        states = [sampler.state_dict(len(done)) for sampler in group]
        assert all(state == states[0] for state in states)
        state = json.loads(json.dumps(states[0]))
    assert state is not None
    return seen, taken, state


def rest(lengths: npt.NDArray[np.int64], budget: int, ranks: int, state: dict[str, Any]) -> tuple[list[Batches], int]:
    group = samplers(lengths, budget, ranks)
    for sampler in group:
        sampler.load_state_dict(state)
        sampler.set_epoch(3)  # as Lightning does at the start of a resumed epoch
    return steps(group), len(group[0])


def test_resumed_at_every_position_from_1_to_2_to_4_ranks_the_rest_is_exact() -> None:
    lengths = log_normal(350, 0.7, 4000)
    whole, total, _ = run_chain(lengths, 4000, [(1, 10**6)])
    assert total > 20
    for first in range(total + 1):
        for second in range((total - first) // 2 + 2):
            seen, taken, state = run_chain(lengths, 4000, [(1, first), (2, second)])
            remaining, length = rest(lengths, 4000, 4, state)
            assert digest(flat(remaining)) == digest(whole[len(seen) :])
            assert seen == whole[: len(seen)]
            assert length == taken + len(remaining)


@pytest.mark.parametrize("sigma", [0.3, 1.2])
def test_any_chain_of_ranks_neither_loses_nor_repeats_a_sample(sigma: float) -> None:
    generator = np.random.default_rng(11)
    for case in range(60):
        lengths = log_normal(int(generator.integers(100, 300)), sigma, 3000, seed=case)
        whole, _, _ = run_chain(lengths, 3000, [(1, 10**6)])
        chain = [(int(generator.integers(1, 9)), int(generator.integers(0, 8))) for _ in range(4)]
        seen, _, state = run_chain(lengths, 3000, chain)
        assert state["num_replicas"] == chain[-1][0]
        remaining, _ = rest(lengths, 3000, int(generator.integers(1, 9)), state)
        assert seen + flat(remaining) == whole


# Of the second kind, most samples are alone in a batch, so that several last steps have to be split.
@pytest.mark.parametrize("budget", [3000, 420])
@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_with_the_same_ranks_a_resumed_epoch_has_the_same_batches(ranks: int, budget: int) -> None:
    lengths = log_normal(200, 0.5, min(budget, 330))
    group = samplers(lengths, budget, ranks)
    for sampler in group:
        sampler.set_epoch(3)
    batches = steps(group)
    for consumed in range(len(batches) + 1):
        remaining, length = rest(lengths, budget, ranks, group[0].state_dict(consumed))
        assert remaining == batches[consumed:]
        assert length == len(batches)


def test_a_state_is_a_few_numbers_however_many_samples() -> None:
    sizes = set()
    for count in (100, 100_000):
        sampler = TokenBudgetBatchSampler([5] * count, 50)
        state = sampler.state_dict(7)
        assert all(isinstance(value, int | str) for value in state.values())
        sizes.add(len(json.dumps(state)))
    assert len(sizes) == 1


def test_a_loader_that_runs_ahead_still_gets_its_state() -> None:
    lengths = log_normal(200, 0.5, 3000)
    sampler = TokenBudgetBatchSampler(lengths, 3000)
    sampler.set_epoch(3)
    batches = list(sampler)
    sampler.load_state_dict(sampler.state_dict(4))
    assert list(sampler) == batches[4:]  # all handed out, two of them consumed
    other = TokenBudgetBatchSampler(lengths, 3000)
    other.load_state_dict(sampler.state_dict(2))
    assert list(other) == batches[6:]


def test_a_resumed_epoch_is_followed_by_whole_ones() -> None:
    lengths = log_normal(200, 0.5, 3000)
    sampler = TokenBudgetBatchSampler(lengths, 3000)
    batches = list(sampler)
    sampler.load_state_dict(sampler.state_dict(4))
    sampler.set_epoch(0)  # announced again: the position stays
    assert list(sampler) == batches[4:]
    assert list(sampler) == batches
    sampler.load_state_dict(sampler.state_dict(4))
    sampler.set_epoch(1)
    assert len(list(sampler)) == len(batches)


def test_the_seed_of_the_interrupted_run_is_continued() -> None:
    lengths = log_normal(200, 0.5, 3000)
    sampler, other = (TokenBudgetBatchSampler(lengths, 3000, seed=seed) for seed in (8, 9))
    other.load_state_dict(sampler.state_dict(3))
    assert list(other) == list(sampler)[3:]


@pytest.mark.parametrize(
    "changed",
    [{"max_tokens": 4001}, {"lengths": [9] * 99 + [8]}, {"max_samples": 5}, {"shuffle": False}],
)
def test_a_state_of_other_batches_is_refused(changed: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"lengths": [9] * 100, "max_tokens": 4000}
    state = TokenBudgetBatchSampler(**arguments).state_dict()
    with pytest.raises(ValueError, match=r"other lengths, max_tokens, .* do not load the state"):
        TokenBudgetBatchSampler(**(arguments | changed)).load_state_dict(state)


@pytest.mark.parametrize(("count", "ranks"), [(3, 8), (1, 2), (10, 4), (9, 8)])
def test_too_few_samples_to_split_are_repeated_with_a_warning(count: int, ranks: int) -> None:
    group = samplers([6] * count, 10, ranks)  # each alone in its batch
    with pytest.warns(UserWarning, match=rf"^{-count % ranks} samples are repeated .* {ranks} ranks"):
        first = list(group[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        others = [list(sampler) for sampler in group[1:]]
    epoch = [list(step) for step in zip(first, *others, strict=True)]
    assert len(epoch) == len(group[0]) == -(-count // ranks)
    seen = Counter(flat(epoch))
    assert set(seen) == set(range(count))
    assert sum(seen.values()) == count + -count % ranks


def test_few_samples_can_be_resumed_on_more_ranks() -> None:
    sampler = TokenBudgetBatchSampler([6] * 9, 10)
    whole = flat([list(sampler)])
    group = samplers([6] * 9, 10, 4)
    for other in group:
        other.load_state_dict(sampler.state_dict(7))
    with pytest.warns(UserWarning, match="2 samples are repeated"):
        assert set(flat(steps(group))) == set(whole[7:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [3, 11, 4, 12]}, r"sample 1 has 11 tokens, not within 0 and max_tokens=10 \(2 such samples"),
        ({"lengths": [3, -1]}, "sample 1 has -1 tokens"),
        ({"lengths": [3.5, 2.0]}, r"whole numbers, one a sample, got an array of float64 and shape \[2\]"),
        ({"lengths": "abc"}, "got 'abc'"),
        ({"lengths": torch.ones(2, 2, dtype=torch.int64)}, r"got an array of int64 and shape \[2, 2\]"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_samples": 0}, "max_samples must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"rank": 1}, "got rank=1, num_replicas=None"),
        ({"rank": 2, "num_replicas": 2}, "got rank=2, num_replicas=2"),
        ({"batch_size": 4}, "got batch_size=4, drop_last=False; leave them out"),
        ({"drop_last": True}, "got batch_size=None, drop_last=True"),
    ],
)
def test_wrong_arguments_are_quoted(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenBudgetBatchSampler(**({"lengths": [3, 4], "max_tokens": 10} | arguments))


@pytest.mark.parametrize("wrong", ["10", 10.5])
def test_a_budget_that_is_no_whole_number_is_quoted(wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"max_tokens={wrong!r} must be a whole number"):
        TokenBudgetBatchSampler([3, 4], wrong)


def test_wrong_epochs_and_counts_are_quoted() -> None:
    sampler = TokenBudgetBatchSampler([3, 4], 10)
    with pytest.raises(ValueError, match="epoch must be at least 0, got -1"):
        sampler.set_epoch(-1)
    with pytest.raises(ValueError, match="consumed_batches must be at least 0, got -2"):
        sampler.state_dict(-2)


LENGTHS = log_normal(290, 0.3, 3000)


class Recorder(pl.LightningModule):
    """Notes the samples of each batch, by epoch."""

    def __init__(self, make_loader: Callable[[], DataLoader[Any]] | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.make_loader = make_loader
        self.seen: list[Batches] = []
        self.validated: Batches = []

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.make_loader is not None
        return self.make_loader()

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen[-1].append(batch[0].int().tolist())
        return self.layer(batch[0].float()[:, None]).mean() * 1e-6

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validated.append(batch[0].int().tolist())

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Batches:
        return [batch[0].int().tolist()]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_loader(sampler: TokenBudgetBatchSampler | None = None) -> DataLoader[Any]:
    sampler = TokenBudgetBatchSampler(LENGTHS, 3000) if sampler is None else sampler
    return DataLoader(TensorDataset(torch.arange(len(LENGTHS))), batch_sampler=sampler)


def make_trainer(ranks: int, **kwargs: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **kwargs,
    )


def _fit(rank: int, world_size: int) -> dict[tuple[bool, bool], list[Batches]]:
    warnings.simplefilter("ignore")
    seen = {}
    for inject in (True, False):
        for in_hook in (True, False):
            # Two more epochs than one, so that an epoch that was cut short shows.
            trainer = make_trainer(world_size, use_distributed_sampler=inject, max_epochs=3)
            sampler = TokenBudgetBatchSampler(LENGTHS, 3000)
            model = Recorder(partial(make_loader, sampler))
            trainer.fit(model, None if in_hook else make_loader(sampler))
            assert sampler.state_dict()["epoch"] == 2
            seen[inject, in_hook] = model.seen
    return seen


def test_lightning_trains_on_each_sample_once_an_epoch_whoever_divides_the_batches() -> None:
    assert len(TokenBudgetBatchSampler(LENGTHS, 3000)) % 2 == 1  # so one is split
    ranks = run_ranks(_fit, 2, init_gloo=False)
    for way in ranks[0]:
        for first, second in zip(ranks[0][way], ranks[1][way], strict=True):
            assert len(first) == len(second) == len(TokenBudgetBatchSampler(LENGTHS, 3000, num_replicas=2, rank=0))
            assert sorted(flat([first, second])) == list(range(len(LENGTHS)))
        assert [digest(flat([batches])) for batches in ranks[0][way]] == [
            digest(flat([batches])) for batches in ranks[0][True, True]
        ]
    compositions = [{tuple(sorted(batch)) for batch in epoch} for epoch in ranks[0][True, True]]
    assert len(compositions) == 3
    assert all(len(compositions[0] & other) < len(other) / 2 for other in compositions[1:])


def _evaluate(rank: int, world_size: int) -> list[list[int]]:
    warnings.simplefilter("ignore")
    model = Recorder()
    make_trainer(world_size).validate(model, make_loader(), verbose=False)
    predictions = make_trainer(world_size).predict(model, make_loader())
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy="ddp")
    fabric.launch()
    batches: Iterator[Any] = iter(fabric.setup_dataloaders(make_loader()))
    return [flat([model.validated]), flat(predictions), [int(sample) for batch in batches for sample in batch[0]]]


def test_lightning_validates_predicts_and_fabric_reads_each_sample_once() -> None:
    for first, second in zip(*run_ranks(_evaluate, 2, init_gloo=False), strict=True):
        assert first
        assert second
        assert sorted(first + second) == list(range(len(LENGTHS)))


def test_ranks_that_lightning_gave_do_not_outlive_its_copy() -> None:
    sampler = TokenBudgetBatchSampler(LENGTHS, 3000)
    injected = torch.utils.data.DistributedSampler(LENGTHS, num_replicas=2, rank=1)  # type: ignore[arg-type]
    copy = TokenBudgetBatchSampler(injected, batch_size=sampler.batch_size, drop_last=sampler.drop_last)  # type: ignore[arg-type]
    assert list(copy) == list(samplers(LENGTHS, 3000, 2)[1])
    assert sorted(flat([list(sampler)])) == list(range(len(LENGTHS)))
    given = TokenBudgetBatchSampler(LENGTHS, 3000, num_replicas=4, rank=2)
    assert len(TokenBudgetBatchSampler(injected, batch_size=given.batch_size)) == len(given)  # type: ignore[arg-type]
