"""Operators of a DataModule: on samples of every stage, with conditions that know whether it is training."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_hpc.data import OperatorGraph, OperatorHints, SharedMemoryDataModule

DEVICE = OperatorHints(runs_on="device")


class Vectors(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((2,), float(index)), "label": torch.tensor(index)}


class Module(pl.LightningModule):
    """Notes what its batches hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.trained: list[Any] = []
        self.validated: list[Any] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.trained.append({name: value.tolist() for name, value in batch.items()})
        loss: Tensor = self.layer(torch.ones(1, 1)).sum()
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validated.append({name: value.tolist() for name, value in batch.items()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def make_graph() -> OperatorGraph:
    graph = OperatorGraph(outputs=("x", "flipped", "sum"))
    graph.add(torch.neg, inputs="x", output="flipped", when="training")
    graph.add(lambda x: x.sum(1), inputs="x", output="sum", hints=DEVICE)
    return graph


class Wrapped(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Vectors(), batch_size=2)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Vectors(), batch_size=4)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_condition_knows_whether_it_is_training(is_wrapped: bool, num_workers: int) -> None:
    if is_wrapped:
        data = SharedMemoryDataModule(datamodule=Wrapped(), operators=make_graph(), num_workers=num_workers)
    else:
        data = SharedMemoryDataModule(
            Vectors(), Vectors(), batch_size=2, shuffle=False, operators=make_graph(), num_workers=num_workers
        )
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, data)
    assert module.trained[0] == {"x": [[0, 0], [1, 1]], "flipped": [[0, 0], [-1, -1]], "sum": [0, 2]}
    assert all(batch.keys() == {"x", "sum"} for batch in module.validated)


def test_what_a_wrapped_datamodule_decides_cannot_be_set_beside_it() -> None:
    for name, value in (("batch_size", 8), ("shuffle", False), ("drop_last", True), ("pin_memory", True)):
        with pytest.raises(ValueError, match=f"{name}={value} is for datasets .* set it in its DataLoaders"):
            SharedMemoryDataModule(datamodule=Wrapped(), **{name: value})


class OwnLoader(DataLoader[Any]):
    """Which is left alone."""


class WithOwnLoader(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return OwnLoader(Vectors(), batch_size=2)


def test_operators_that_would_reach_no_sample_are_refused() -> None:
    data = SharedMemoryDataModule(datamodule=WithOwnLoader(), operators=make_graph())
    with pytest.raises(TypeError, match="operators does not reach the batches of a OwnLoader"):
        data.train_dataloader()
