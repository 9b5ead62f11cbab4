"""Who takes batches to the device, what is transformed there, and that a run goes on exactly whoever does."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hpc.data import datamodule
from lightning_hpc.data.datamodule import SharedMemoryDataModule
from lightning_hpc.data.loader import SharedMemoryLoader
from lightning_hpc.data.transfer import copying_device
from tests.data.fake_cuda import FakeCuda, OnDevice
from tests.data.modules import Drawn, Plain, Remembers, Saves, Stream, fit, plain_loader

CUDA = torch.device("cuda", 0)

# Lightning's own, of few workers and of PyTorch's deprecations.


def negated(batch: Any) -> Any:
    return [-batch[0], *batch[1:]]


@pytest.mark.parametrize("device_prefetch", [0, 2])
def test_on_the_cpu_batches_stay_where_they_are(device_prefetch: int) -> None:
    data = SharedMemoryDataModule(Drawn(8), Drawn(4), batch_size=4, num_workers=0, device_prefetch=device_prefetch)
    fit(data, max_epochs=1)
    loader: Any = data.train_dataloader()
    assert (loader.device, loader.device_transform, loader._prefetcher) == (None, None, None)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_training_batches_are_transformed_and_no_others(is_wrapped: bool) -> None:
    class Both(Plain):
        def val_dataloader(self) -> Any:
            return plain_loader(Drawn(4))

    settings: dict[str, Any] = {"num_workers": 0, "device_transform": negated}
    if is_wrapped:
        data = SharedMemoryDataModule(datamodule=Both(lambda: plain_loader(Drawn(4))), **settings)
    else:
        data = SharedMemoryDataModule(Drawn(4), Drawn(4), batch_size=4, shuffle=False, **settings)
    model, _ = fit(data, max_epochs=1)
    assert model.seen[0][2][0] == [0, -1, -2, -3]
    assert model.evaluated == [(0, [0, 1, 2, 3])]


class Watches(Remembers):
    """Writes down where batches were when Lightning would have moved them."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived: set[type] = set()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.arrived.add(type(batch[0]))
        return batch


@pytest.mark.parametrize("train", [Drawn(31), Stream(31)], ids=["map", "stream"])
def test_a_run_goes_on_exactly_with_batches_on_their_way(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeCuda(is_late=False).install(monkeypatch)

    def make(num_workers: int = 0) -> SharedMemoryDataModule:
        return SharedMemoryDataModule(train, Drawn(5), batch_size=4, num_workers=num_workers, device_prefetch=3)

    plain, _ = fit(make(), model=Watches(), max_epochs=2)
    monkeypatch.setattr(datamodule, "copying_device", lambda *_: CUDA)
    saves = Saves(tmp_path, ("on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"))
    model = Watches()
    whole, _ = fit(make(), model=model, callbacks=[saves], max_epochs=2)
    assert whole.seen == plain.seen
    assert model.arrived == {OnDevice}
    assert len(gpu.streams) == 3  # one each for training and validation
    for index, (hook, place, path) in enumerate(saves.saved[::3]):
        rest, _ = fit(make(num_workers=index % 3 // 2), path, max_epochs=2)
        assert rest.seen == whole.seen[place:], (hook, place)


def trainer_on(device: torch.device, model: pl.LightningModule) -> Any:
    return SimpleNamespace(lightning_module=model, strategy=SimpleNamespace(root_device=device))


def test_loaders_take_batches_to_the_cuda_device_of_the_strategy() -> None:
    data: Any = SharedMemoryDataModule(Drawn(8))
    assert copying_device(data, None, True) is None
    for device, expected in ((CUDA, CUDA), (torch.device("cpu"), None), (torch.device("mps"), None)):
        data.trainer = trainer_on(device, Watches())
        assert copying_device(data, None, True) == expected


class Early(Remembers):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class EarlyData(Plain):
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch


class EarlySubclass(SharedMemoryDataModule):
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch


@pytest.mark.parametrize("device", [CUDA, torch.device("cpu")])
@pytest.mark.parametrize("owner", ["Early", "EarlyData", "EarlySubclass"])
def test_hooks_that_come_before_the_device_leave_copying_to_lightning(owner: str, device: torch.device) -> None:
    model = Early() if owner == "Early" else Watches()
    inner = EarlyData(plain_loader) if owner == "EarlyData" else None
    data: Any = SharedMemoryDataModule(datamodule=inner) if inner is not None else SharedMemoryDataModule(Drawn(8))
    if owner == "EarlySubclass":
        data = EarlySubclass(Drawn(8))
    data.trainer = trainer_on(device, model)
    assert copying_device(data, inner, False) is None
    with pytest.raises(ValueError, match=rf"^{owner} overrides (on_before|transfer)_batch\w+, which comes before"):
        copying_device(data, inner, True)


def test_a_transform_with_an_early_hook_fails_where_the_trainer_reads_the_loaders() -> None:
    data = SharedMemoryDataModule(Drawn(8), batch_size=4, num_workers=0, device_transform=negated)
    with pytest.raises(ValueError, match="Early overrides on_before_batch_transfer"):
        fit(data, model=Early(), max_epochs=1)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="device_prefetch=-1 must be at least 0"):
        SharedMemoryDataModule(Drawn(8), device_prefetch=-1)
    with pytest.raises(ValueError, match="device_prefetch=0 must be at least 1"):
        SharedMemoryDataModule(Drawn(8), device_prefetch=0, device_transform=negated)

    class Mine(DataLoader[Any]):
        pass

    data = SharedMemoryDataModule(datamodule=Plain(lambda: Mine(Drawn())), num_workers=0, device_transform=negated)
    with pytest.raises(TypeError, match="does not reach the batches of a Mine"):
        data.train_dataloader()


def test_loaders_that_lightning_makes_anew_keep_their_device() -> None:
    """It does so for a sampler of its own, from the attributes that have the arguments' names."""
    loader: SharedMemoryLoader[Any] = SharedMemoryLoader(
        Drawn(8), 4, device="cuda:1", device_transform=negated, device_prefetch=3
    )
    names = {"device", "device_transform", "device_prefetch"}
    assert {name: vars(loader)[name] for name in names} == {
        "device": "cuda:1",
        "device_transform": negated,
        "device_prefetch": 3,
    }


def test_a_wrapped_loader_keeps_its_arguments_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datamodule, "copying_device", lambda *_: CUDA)
    inner = Plain(lambda: plain_loader(drop_last=True))
    loader: Any = SharedMemoryDataModule(datamodule=inner, num_workers=0, device_prefetch=3).train_dataloader()
    assert (loader.device, loader.device_prefetch, loader.drop_last) == (CUDA, 3, True)
    assert isinstance(loader.dataset[0][1], Tensor)
