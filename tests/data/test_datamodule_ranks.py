"""Several ranks: the order is that of one, whatever their number was; evaluation reads each sample once."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_hpc.data.batching import TokenBudgetBatchSampler
from lightning_hpc.data.datamodule import SharedMemoryDataModule
from lightning_hpc.strategies import HPCStrategy
from tests.data.modules import SAMPLES, Drawn, Remembers, Saves, fit, make_trainer, plain_loader, wrapped
from tests.helpers import run_ranks

LENGTHS = [1 + index * 7 % 13 for index in range(SAMPLES)]
EPOCHS = 3


def make(kind: str, num_workers: int = 0) -> SharedMemoryDataModule:
    if kind == "datasets":
        return SharedMemoryDataModule(Drawn(), [Drawn(11), Drawn(5)], batch_size=4, num_workers=num_workers)
    if kind == "wrapped":
        return wrapped(lambda: plain_loader(shuffle=True), num_workers)
    return wrapped(lambda: DataLoader(Drawn(), batch_sampler=TokenBudgetBatchSampler(LENGTHS, 40)), num_workers)


def strategy_of(name: str) -> Any:
    return HPCStrategy(topology="flat") if name == "hpc" else name


def train(rank: int, ranks: int, kinds: list[str], folder: Path, strategy: str, num_workers: int) -> Any:
    """All kinds; the batches of each, and its checkpoints by place."""
    results = {}
    for kind in kinds:
        (folder / kind).mkdir(parents=True, exist_ok=True)
        saves = Saves(folder / kind, ("on_train_batch_end",))
        model, _ = fit(
            make(kind, num_workers),
            strategy=strategy_of(strategy),
            devices=ranks,
            max_epochs=EPOCHS,
            callbacks=[saves],
        )
        results[kind] = (model.seen, model.evaluated, {place: path for _, place, path in saves.saved})
    return results


def go_on(rank: int, ranks: int, runs: list[tuple[str, Path]]) -> Any:
    results = []
    for kind, path in runs:
        model, _ = fit(make(kind), path, strategy="ddp" if ranks > 1 else "auto", devices=ranks, max_epochs=EPOCHS)
        results.append((model.seen, model.evaluated))
    return results


def order(ranks: list[list[Any]], epoch: int) -> list[int]:
    """What the ranks read in an epoch, in the order of the epoch."""
    read = []
    for step in zip(*ranks, strict=True):
        batches = [batch[0] for each, _, batch in step if each == epoch]
        read += [number for row in itertools.zip_longest(*batches) for number in row if number is not None]
    return read


def evaluate(rank: int, ranks: int) -> Any:
    results: dict[Any, Any] = {}
    whole = SharedMemoryDataModule(Drawn(8), Drawn(8), batch_size=4, shuffle=False, num_workers=0)
    model, _ = fit(whole, strategy="ddp", devices=ranks, max_epochs=1, use_distributed_sampler=False)
    assert [number for _, _, batch in model.seen for number in batch[0]] == list(range(8))
    assert [number for _, batch in model.evaluated for number in batch] == list(range(8))
    for numel in (11, 8, 4):
        data = SharedMemoryDataModule(
            val_dataset=Drawn(numel),
            test_dataset=Drawn(numel),
            predict_dataset=Drawn(numel),
            batch_size=2,
            num_workers=0,
        )
        for name in ("validate", "test", "predict"):
            model, trainer = Remembers(), make_trainer(strategy="ddp", devices=ranks)
            predicted = getattr(trainer, name)(
                model, datamodule=data, **({} if name == "predict" else {"verbose": False})
            )
            results[name, numel] = predicted if name == "predict" else [batch for _, batch in model.evaluated]
    return results


def test_evaluation_reads_each_sample_once_in_as_many_batches_on_every_rank() -> None:
    by_rank = run_ranks(evaluate, 3, init_gloo=False)
    for (_, numel), batches in [(key, [own[key] for own in by_rank]) for key in by_rank[0]]:
        assert len({len(own) for own in batches}) == 1
        assert sorted(number for own in batches for batch in own for number in batch) == list(range(numel))


@pytest.mark.parametrize(("strategy", "num_workers"), [("ddp", 1), ("hpc", 0)])
def test_what_two_ranks_have_begun_is_ended_by_any_number_of_them(
    strategy: str, num_workers: int, tmp_path: Path
) -> None:
    kinds = ["datasets", "wrapped", "tokens"] if strategy == "ddp" else ["datasets"]
    alone = train(0, 1, kinds, tmp_path / "alone", "auto", 0)
    two = run_ranks(train, 2, kinds, tmp_path / "two", strategy, num_workers, init_gloo=False)
    steps = {kind: len(two[0][kind][0]) // EPOCHS for kind in kinds}
    places = {kind: [3, count, count + 2] for kind, count in steps.items()}
    runs = [(kind, two[0][kind][2][place]) for kind in kinds for place in places[kind]]
    for ranks in (1, 2, 4):
        ended = [go_on(0, 1, runs)] if ranks == 1 else run_ranks(go_on, ranks, runs, init_gloo=False)
        for number, (kind, place) in enumerate(
            itertools.chain(*([(name, at) for at in places[name]] for name in kinds))
        ):
            begun = [own[kind][0][:place] for own in two]
            rest = [own[number][0] for own in ended]
            for epoch in range(EPOCHS):
                read = order(begun, epoch) + order(rest, epoch)
                if kind == "tokens":
                    assert set(read) == set(range(SAMPLES))
                    assert len(read) - SAMPLES < max(ranks, 2)
                else:
                    assert read[:SAMPLES] == order([alone[kind][0]], epoch)
                    assert len(read) - SAMPLES < max(ranks, 2)
            if kind == "datasets":
                # Validation at the end of each epoch that is ended here; the counts are those of this number of ranks.
                per_epoch = -(-11 // (4 * ranks)) + -(-5 // (4 * ranks))
                assert {len(own[number][1]) for own in ended} == {per_epoch * (EPOCHS - (place >= steps[kind]))}
