"""The invariant: one order of all samples, whose remainder is the same for any number of ranks and workers."""

import itertools
import json
import os
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_hpc.data import shards
from lightning_hpc.data.shard_index import ShardIndex
from lightning_hpc.data.shards import TarShardDataset
from tests.data.shard_files import write_shards
from tests.helpers import free_port, run_ranks

BATCH = 3


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_shards(tmp_path_factory.mktemp("shards"), [7, 1, 30, 19, 40])  # 97 samples, a prime


def number_of(sample: dict[str, Any]) -> int:
    return int(sample["n"])


def worker_batches(dataset: TarShardDataset, worker: int, workers: int) -> list[list[int]]:
    """What one worker of a loader makes of the dataset."""
    with pytest.MonkeyPatch.context() as patch:
        info = SimpleNamespace(id=worker, num_workers=workers) if workers else None
        patch.setattr(shards, "get_worker_info", lambda: info)
        samples = iter(pickle.loads(pickle.dumps(dataset)))  # each worker has its own
    return [[number_of(sample) for sample in batch] for batch in batched(samples, dataset.batch_size)]


def batched(samples: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while batch := list(itertools.islice(samples, size)):
        yield batch


def loader_batches(dataset: TarShardDataset, workers: int) -> list[list[int]]:
    """All batches in the order in which a loader asks its workers for them."""
    parts = [worker_batches(dataset, worker, workers) for worker in range(max(workers, 1))]
    turns = itertools.zip_longest(*parts)
    return [batch for turn in turns for batch in turn if batch is not None]


def rank_samples(dataset: TarShardDataset, workers: int = 0) -> list[int]:
    return [number for batch in loader_batches(dataset, workers) for number in batch]


def make(paths: list[Path], ranks: int = 1, rank: int = 0, **settings: Any) -> TarShardDataset:
    settings = {"batch_size": BATCH, "shuffle": True, "buffer_size": 20, "seed": 5, **settings}
    return TarShardDataset(paths, num_replicas=ranks, rank=rank, **settings)


def merged(parts: list[list[int]]) -> list[int]:
    """The one order, put together from what the ranks saw; each has as many samples as the others."""
    return [number for turn in zip(*parts, strict=True) for number in turn]


SETTINGS: list[dict[str, Any]] = [
    {"shuffle": False},
    {"buffer_size": 1},
    {"buffer_size": 20},
    {"buffer_size": 49},
    {"buffer_size": 96},
    {"buffer_size": 500},
    {"shuffle": False, "buffer_size": 5},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_each_sample_comes_once_whatever_the_ranks_and_workers(paths: list[Path], settings: dict[str, Any]) -> None:
    order = rank_samples(make(paths, **settings))
    assert sorted(order) == list(range(97))
    for ranks in (1, 2, 3, 4):
        for workers in (0, 1, 2):
            parts = [rank_samples(make(paths, ranks, rank, **settings), workers) for rank in range(ranks)]
            assert {len(part) for part in parts} == {97 // ranks}
            assert merged(parts) == order[: 97 // ranks * ranks]


@pytest.mark.parametrize("batch_size", [1, 3, 8, 200])
def test_batches_are_the_same_for_any_number_of_workers(paths: list[Path], batch_size: int) -> None:
    dataset = make(paths, 2, 1, batch_size=batch_size)
    expected = loader_batches(dataset, 0)
    assert [len(batch) for batch in expected[:-1]] == [batch_size] * (len(expected) - 1)
    for workers in (1, 2, 3, 5):
        assert loader_batches(dataset, workers) == expected


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_of_torchs_loader_are_the_same_for_any_number_of_workers(paths: list[Path], drop_last: bool) -> None:
    dataset = make(paths, decode=number_of)
    expected = [batch for batch in loader_batches(make(paths), 0) if len(batch) == BATCH or not drop_last]
    for workers in (0, 1, 2):
        loader = DataLoader(dataset, BATCH, num_workers=workers, drop_last=drop_last)
        assert [batch.tolist() for batch in loader] == expected
        assert len(loader) == len(expected)


@pytest.mark.parametrize("settings", [{}, {"shuffle": False}, {"buffer_size": 500}], ids=str)
def test_resumes_at_every_position_on_other_ranks(paths: list[Path], settings: dict[str, Any]) -> None:
    order = rank_samples(make(paths, **settings))
    single = make(paths, **settings)
    pair = [make(paths, 2, rank, **settings) for rank in range(2)]
    four = [make(paths, 4, rank, **settings) for rank in range(4)]
    for first in range(97):
        state = single.state_dict(first)
        for dataset in pair:
            dataset.load_state_dict(state)
        assert merged([rank_samples(dataset) for dataset in pair]) == order[first : first + (97 - first) // 2 * 2]
        for second in range(first % 3, (97 - first) // 2, 9):
            states = [dataset.state_dict(second) for dataset in pair]
            assert states[0] == states[1]
            for dataset in four:
                dataset.load_state_dict(states[0])
            remaining = order[first + 2 * second :]
            assert [len(dataset) for dataset in four] == [len(remaining) // 4] * 4
            assert merged([rank_samples(dataset) for dataset in four]) == remaining[: len(remaining) // 4 * 4]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_resumes_after_every_batch_with_the_same_batches(paths: list[Path], workers: int) -> None:
    dataset = make(paths, 2, 1)
    dataset.set_epoch(3)
    batches = loader_batches(dataset, workers)
    for consumed in range(len(batches) + 1):
        state = json.loads(json.dumps(dataset.state_dict(consumed * BATCH)))
        resumed = make(paths, 2, 1)
        resumed.load_state_dict(state)
        resumed.set_epoch(3)  # a loop announces the epoch that it resumes
        assert loader_batches(resumed, workers) == batches[consumed:]
        assert len(resumed) == sum(map(len, batches[consumed:]))


def test_consumed_is_counted_from_the_state_that_was_loaded(paths: list[Path]) -> None:
    order = rank_samples(make(paths))
    dataset = make(paths)
    for consumed in (9, 6, 12):
        dataset.load_state_dict(dataset.state_dict(consumed))
    assert rank_samples(dataset) == order[27:]
    dataset.set_epoch(1)
    assert len(dataset) == 97
    assert dataset.state_dict(99)["position"] == 97  # the last batch is smaller, and counted as a whole one


def test_the_state_has_the_same_size_anywhere(paths: list[Path]) -> None:
    dataset = make(paths, 4, 2)
    assert {len(dataset.state_dict(consumed)) for consumed in range(24)} == {6}
    assert all(isinstance(value, int) for value in dataset.state_dict(7).values())


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"seed": 6}, "seed"), ({"shuffle": False}, "shuffle"), ({"buffer_size": 21}, "buffer_size")],
)
def test_a_state_of_another_order_is_refused(paths: list[Path], settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=rf"saved with {name}=.*make the dataset as it was"):
        make(paths).load_state_dict(make(paths, **settings).state_dict(3))


def test_a_state_of_other_shards_or_none_is_refused(paths: list[Path]) -> None:
    state = make(paths).state_dict(3)
    for others in (paths[:-1], paths[::-1]):
        with pytest.raises(ValueError, match="saved with fingerprint="):
            make(others).load_state_dict(state)
    with pytest.raises(ValueError, match="lacks 'epoch'"):
        make(paths).load_state_dict({})
    for wrong in ({"position": 98}, {"position": -1}, {"epoch": -1}):
        with pytest.raises(ValueError, match="an epoch or a position that 97 samples cannot have"):
            make(paths).load_state_dict({**state, **wrong})
    for consumed in (-1, 100):
        with pytest.raises(ValueError, match=f"consumed={consumed} samples is not between 0 and 99"):
            make(paths).state_dict(consumed)


def test_the_order_depends_on_seed_and_epoch_and_nothing_else(paths: list[Path]) -> None:
    orders = set()
    for seed, epoch in itertools.product((0, 1, 2, -1, 2**63), (0, 1, 2)):
        datasets = [make(paths, seed=seed), make(paths, seed=seed)]
        for dataset in datasets:
            dataset.set_epoch(epoch)
        assert rank_samples(datasets[0]) == rank_samples(datasets[1])
        orders.add(tuple(rank_samples(datasets[0])))
    assert len(orders) == 15


def test_samples_that_ranks_do_not_divide_are_other_ones_each_epoch(paths: list[Path]) -> None:
    left_out = Counter[int]()
    datasets = [make(paths, 4, rank) for rank in range(4)]
    for epoch in range(20):
        seen = set[int]()
        for dataset in datasets:
            dataset.set_epoch(epoch)
            seen |= set(rank_samples(dataset))
        left_out.update(set(range(97)) - seen)
    assert sum(left_out.values()) == 20
    assert max(left_out.values()) <= 3


def test_a_batch_mixes_samples_from_all_over_the_shards(tmp_path: Path) -> None:
    dataset = make(write_shards(tmp_path, [2000]), buffer_size=480, batch_size=48)
    for batch in loader_batches(dataset, 0)[:40]:
        assert len({number // 10 for number in batch}) >= 30  # of 200 places
        assert max(batch) - min(batch) > 1000


def record_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where each read began, from now on."""
    places: list[int] = []
    read = os.pread

    def recording(descriptor: int, length: int, offset: int) -> bytes:
        places.append(offset)
        return read(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", recording)
    return places


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 24, 48])
def test_a_rank_reads_whole_blocks_in_the_order_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    window, block = 240, 5
    dataset = make(write_shards(tmp_path, [5 * window]), ranks, 0, buffer_size=window, batch_size=1)
    starts = {start: number for number, start in enumerate(dataset.index.spans(np.arange(5 * window))[1])}
    places = record_reads(monkeypatch)
    share = window // ranks
    samples = list(itertools.islice(iter(dataset), 3 * share))
    assert len(places) == 4 * share  # one read a sample; the fourth window has been read ahead
    ahead = [starts[place] for place in places[2 * share :]]  # when the second is handed out, nothing else is read
    for part in (ahead[:share], ahead[share:]):
        assert part == sorted(part)
        runs = sum(after != before + 1 for before, after in itertools.pairwise(part)) + 1
        assert runs <= share // block + 2  # blocks, of which one may lie around the end
    assert len(samples) == 3 * share


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_descriptors_do_not_grow_and_are_given_back(tmp_path: Path) -> None:
    dataset = make(write_shards(tmp_path, [10] * 40), buffer_size=100)
    before = open_descriptors()
    samples = iter(dataset)
    for _ in samples:
        assert open_descriptors() <= before + 2
    assert open_descriptors() == before
    samples = iter(dataset)
    next(samples)
    samples.close()  # type: ignore[attr-defined]
    assert open_descriptors() == before


def test_a_sample_is_a_dictionary_or_what_decode_makes_of_it(paths: list[Path]) -> None:
    first = next(iter(make(paths, shuffle=False)))
    assert first == {"__key__": "0", "n": b"0", "x": b""}
    assert next(iter(make(paths, shuffle=False, decode=number_of))) == 0


def test_an_error_of_decode_names_sample_and_shard(paths: list[Path]) -> None:
    def decode(sample: dict[str, Any]) -> int:
        return 1 // (int(sample["n"]) - 8)

    with pytest.raises(RuntimeError, match=rf"decode failed for sample '8' of shard {paths[2]}: ZeroDivisionError"):
        list(make(paths, shuffle=False, decode=decode))


def test_a_persistent_worker_that_repeats_an_epoch_warns(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, plain = make(paths), make(paths, shuffle=False)
    monkeypatch.setattr(shards, "get_worker_info", lambda: SimpleNamespace(id=0, num_workers=1))
    iter(dataset)
    dataset.set_epoch(1)
    iter(dataset)
    with pytest.warns(UserWarning, match="goes through epoch 1 again"):
        iter(dataset)
    iter(plain)
    iter(plain)


def test_a_pattern_finds_the_shards(paths: list[Path]) -> None:
    dataset = TarShardDataset(paths[0].parent / "train-{000..004}.tar", batch_size=1)
    assert dataset.index.paths == tuple(map(str, paths))


def test_a_shard_that_has_changed_is_an_error(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, [5])
    dataset = make([path])
    os.truncate(path, 1024)
    with pytest.raises(ValueError, match=f"shard {path} does not have the"):
        list(dataset)


def test_the_index_is_kept_and_made_again_when_shards_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, file = write_shards(tmp_path, [5, 6]), tmp_path / "index"
    expected = rank_samples(make(paths))
    assert rank_samples(make(paths, index_file=file)) == expected
    with monkeypatch.context() as patch:
        patch.setattr(ShardIndex, "scan", lambda _: pytest.fail("the headers were read again"))
        assert rank_samples(make(paths, index_file=file)) == expected
    write_shards(tmp_path, [5, 8])
    assert len(make(paths, index_file=file)) == 13


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"buffer_size": 0}, "buffer_size must be at least 1, got 0"),
        ({"num_replicas": 2}, "give both"),
        ({"rank": 0}, "give both"),
        ({"num_replicas": 2, "rank": 2}, "give both"),
        ({"num_replicas": 0, "rank": 0}, "give both"),
    ],
)
def test_arguments_out_of_range_are_refused(paths: list[Path], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TarShardDataset(paths, **{"batch_size": 2, **settings})
    with pytest.raises(ValueError, match="epoch must be at least 0, got -1"):
        TarShardDataset(paths, batch_size=1).set_epoch(-1)


def ranks_of_the_job(rank: int, world_size: int, paths: list[Path], port: int) -> tuple[list[int], list[int]]:
    settings = {"batch_size": BATCH, "shuffle": True, "buffer_size": 20, "seed": 5}
    before = TarShardDataset(paths, **settings)  # type: ignore[arg-type]
    copied_before = pickle.loads(pickle.dumps(before))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    assert rank_samples(copied_before) == rank_samples(before)
    in_rank, message = rank_samples(before), pickle.dumps(before)
    dist.destroy_process_group()
    return in_rank, rank_samples(pickle.loads(message))  # as in a worker that was spawned


def test_the_rank_is_that_of_the_job_also_in_workers_that_have_no_process_group(paths: list[Path]) -> None:
    parts = run_ranks(ranks_of_the_job, 2, paths, free_port(), init_gloo=False)
    assert all(in_rank == in_worker for in_rank, in_worker in parts)
    assert merged([in_rank for in_rank, _ in parts]) == rank_samples(make(paths))[:96]
