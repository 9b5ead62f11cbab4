"""The user's loader, found and made again."""

import multiprocessing
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from lightning_hpc.commands.data_result import OWN, PEER
from lightning_hpc.commands.training_loader import TrainingLoader, make_training_loader
from lightning_hpc.data import OperatorGraph, OperatorHints, SharedMemoryDataModule, SharedMemoryLoader

DATA = TensorDataset(torch.arange(20))


class OfItsOwn(DataLoader[Any]):
    def __init__(self, size: int) -> None:
        super().__init__(DATA, batch_size=size)


class Gives(LightningDataModule):
    """Gives a loader, or raises; remembers what was called."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader, self.calls = loader, ["made"]

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def train_dataloader(self) -> Any:
        self.calls.append("train_dataloader")
        return self.loader


def init_worker(number: int) -> None:
    pass


def collate(samples: list[Any]) -> Any:
    return samples


def test_it_is_set_up_as_for_a_fit() -> None:
    data = Gives(DataLoader(DATA))
    loader, remarks = make_training_loader(data)
    assert data.calls == ["made", "prepare_data", "setup fit", "train_dataloader"]
    assert loader.names == (PEER, OWN)
    assert remarks == []


@pytest.mark.parametrize("name", [PEER, OWN])
def test_all_arguments_but_the_workers_stay(name: str) -> None:
    context = multiprocessing.get_context("spawn")
    given: dict[str, Any] = {
        "batch_size": 3,
        "drop_last": True,
        "collate_fn": collate,
        "worker_init_fn": init_worker,
        "generator": torch.Generator(),
        "timeout": 7,
        "prefetch_factor": 5,
        "multiprocessing_context": context,
        "in_order": False,
    }
    loader = DataLoader(DATA, shuffle=True, num_workers=2, **given)
    made = TrainingLoader(loader).make(name, 1)
    assert type(made) is {PEER: DataLoader, OWN: SharedMemoryLoader}[name]
    assert made.num_workers == 1
    assert {key: getattr(made, key) for key in given} == given
    assert made.dataset is DATA
    assert made.sampler is loader.sampler
    alone = TrainingLoader(loader).make(name, 0)
    assert (alone.num_workers, alone.timeout, alone.prefetch_factor) == (0, 0, None)
    assert len(list(alone)) == 6
    assert (loader.num_workers, loader.prefetch_factor, loader.timeout) == (2, 5, 7)


@pytest.mark.parametrize("name", [PEER, OWN])
def test_a_loader_without_workers_gets_them(name: str) -> None:
    made = TrainingLoader(DataLoader(DATA, batch_size=5, persistent_workers=False)).make(name, 2)
    assert (made.num_workers, made.prefetch_factor) == (2, 2)


@pytest.mark.parametrize("name", [PEER, OWN])
def test_batch_samplers_and_samples_without_batches_stay(name: str) -> None:
    sampler = [[3, 1], [2]]
    made = TrainingLoader(DataLoader(DATA, batch_sampler=sampler)).make(name, 0)
    assert [batch[0].tolist() for batch in made] == sampler
    plain = BatchSampler(SequentialSampler(DATA), 8, True)
    made = TrainingLoader(DataLoader(DATA, batch_sampler=plain)).make(name, 0)
    assert [len(batch[0]) for batch in made] == [8, 8]
    made = TrainingLoader(DataLoader(DATA, batch_size=None)).make(name, 0)
    assert [int(sample[0]) for sample in made] == list(range(20))


def test_a_shared_memory_loader_is_compared_too() -> None:
    loader, _ = make_training_loader(SharedMemoryDataModule(DATA, batch_size=4, num_workers=0, shuffle=False))
    assert type(loader.make(PEER, 0)) is DataLoader
    assert type(loader.make(OWN, 0)) is SharedMemoryLoader
    assert [batch[0].tolist() for batch in loader.make(PEER, 0)] == [batch[0].tolist() for batch in loader.make(OWN, 0)]


def test_a_loader_of_another_class_stays_what_it_is_and_is_not_replaced() -> None:
    loader, remarks = make_training_loader(Gives(OfItsOwn(4)))
    assert loader.names == (PEER,)
    made = loader.make(PEER, 1)
    assert type(made) is OfItsOwn
    assert (made.num_workers, made.batch_size) == (1, 4)
    assert "The loader is a OfItsOwn, which may read in a way of its own" in remarks[0]


@pytest.mark.parametrize("several", [list, dict, CombinedLoader])
def test_of_several_loaders_the_first_is_taken_and_that_is_said(several: Any) -> None:
    loaders = [DataLoader(DATA, batch_size=2), DataLoader(DATA, batch_size=3)]
    given = {"a": loaders[0], "b": loaders[1]} if several is dict else several(loaders)
    loader, remarks = make_training_loader(Gives(given))
    assert loader.make(PEER, 0).batch_size == 2
    assert remarks == [
        "train_dataloader() returned 2 loaders, of which the first is measured; return another one alone to measure"
        " that."
    ]


@pytest.mark.parametrize(("given", "what"), [(DATA, "TensorDataset"), ([], "nothing"), (None, "NoneType")])
def test_what_is_no_loader_is_refused(given: Any, what: str) -> None:
    with pytest.raises(TypeError, match=f"returned {what}, whose number of workers cannot be changed .*return a torch"):
        make_training_loader(Gives(given))


def test_errors_of_the_users_code_are_named_with_their_place() -> None:
    class Broken(Gives):
        def setup(self, stage: str) -> None:
            raise FileNotFoundError("no images")

    with pytest.raises(RuntimeError, match=r"Broken.setup\('fit'\) failed: FileNotFoundError: no images \(test_train"):
        make_training_loader(Broken(None))


def test_who_needs_a_trainer_is_told_that_there_is_none() -> None:
    class NeedsTrainer(Gives):
        def train_dataloader(self) -> Any:
            return DataLoader(DATA, batch_size=self.trainer.world_size)  # type: ignore[union-attr]

    with pytest.raises(RuntimeError, match=r"train_dataloader\(\) failed.*self\.trainer is None here, since nothing"):
        make_training_loader(NeedsTrainer(None))


@pytest.mark.parametrize("batch_size", [2, None])
def test_both_loaders_do_what_workers_do_of_the_operators(batch_size: int | None) -> None:
    graph = OperatorGraph(outputs=("y", "z"))
    graph.add(torch.neg, inputs="x", output="y")
    graph.add(torch.neg, inputs="y", output="z", hints=OperatorHints(runs_on="device"))
    data = [{"x": torch.tensor(float(number))} for number in range(4)]
    found = TrainingLoader(SharedMemoryLoader(data, batch_size, operators=graph))  # type: ignore[arg-type]
    for workers in (0, 1):
        own, peer = (list(found.make(name, workers)) for name in (OWN, PEER))
        assert [batch["y"].tolist() for batch in own] == [batch["y"].tolist() for batch in peer]
        assert [set(batch) for batch in own + peer] == [{"y"}] * len(own + peer)
