"""A run that is stopped anywhere goes on with exactly the batches that are left, whatever Lightning is told to do."""

import copy
import io
import multiprocessing
import pickle
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, RandomSampler

from lightning_hpc.data.batching import TokenBudgetBatchSampler
from lightning_hpc.data.datamodule import SharedMemoryDataModule
from lightning_hpc.data.loader import SharedMemoryLoader
from lightning_hpc.data.sampling import ElasticSampler
from lightning_hpc.data.shards import TarShardDataset
from tests.data.modules import (
    SAMPLES,
    Drawn,
    Plain,
    Remembers,
    Saves,
    Stream,
    fit,
    plain_loader,
    wrapped,
)

BATCHES = ("on_train_batch_end", "on_train_epoch_end", "on_train_epoch_start")
EVERYWHERE = (*BATCHES, "on_train_batch_start", "on_validation_start", "on_validation_batch_end", "on_validation_end")
LENGTHS = [1 + index * 7 % 13 for index in range(SAMPLES)]


def datasets(**kwargs: Any) -> SharedMemoryDataModule:
    return SharedMemoryDataModule(kwargs.pop("train", Drawn()), **{"batch_size": 4, "num_workers": 0, **kwargs})


def assert_exact(
    folder: Path,
    make: Callable[[], pl.LightningDataModule],
    hooks: tuple[str, ...] = BATCHES,
    every: int = 1,
    make_other: Callable[[], pl.LightningDataModule] | None = None,
    compare: Callable[[Any], Any] = lambda seen: seen,
    **kwargs: Any,
) -> list[Any]:
    saves = Saves(folder, hooks)
    whole, _ = fit(make(), callbacks=[saves], **kwargs)
    assert saves.saved
    for hook, place, path in saves.saved[::every]:
        rest, _ = fit((make_other or make)(), path, **kwargs)
        assert compare(rest.seen) == compare(whole.seen[place:]), (hook, place)
    return whole.seen


def numbers(seen: list[Any]) -> Any:
    """Without what was drawn and how Lightning has numbered the batches."""
    return [batch[0] if isinstance(batch, tuple) else batch for _, _, batch in seen]


# Lightning's own, of few workers, of steps that a model lacks, and of PyTorch's deprecations.


@pytest.mark.parametrize("limits", [{"max_epochs": 2}, {"max_epochs": -1, "max_steps": 20}])
def test_goes_on_from_every_hook(limits: dict[str, Any], tmp_path: Path) -> None:
    data = {"val_dataset": [Drawn(5), Drawn(3)], "train": Drawn(31)}
    assert_exact(tmp_path, lambda: datasets(**data), EVERYWHERE, every=2, **limits)


@pytest.mark.parametrize(
    "settings",
    [
        {"limit_train_batches": 3},
        {"limit_train_batches": 3, "max_steps": 8},
        {"accumulate_grad_batches": 3},
        {"val_check_interval": 2},
        {"overfit_batches": 3},
    ],
    ids=str,
)
def test_goes_on_under_settings_of_the_trainer(settings: dict[str, Any], tmp_path: Path) -> None:
    data = {"val_dataset": Drawn(5), "train": Drawn(23)}
    assert_exact(tmp_path, lambda: datasets(**data), max_epochs=2, every=2, **settings)


def test_goes_on_where_loaders_are_made_anew_in_each_epoch(tmp_path: Path) -> None:
    assert_exact(
        tmp_path,
        lambda: datasets(train=Drawn(23)),
        max_epochs=3,
        reload_dataloaders_every_n_epochs=1,
        compare=numbers,
        every=2,
    )


def test_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    assert_exact(tmp_path, datasets, max_epochs=2, make_other=lambda: datasets(num_workers=2), every=5)


def test_loses_no_batch_that_lightning_has_looked_ahead_at(tmp_path: Path) -> None:
    hooks = ("on_train_batch_end", "on_train_epoch_end", "on_train_batch_start")
    assert_exact(tmp_path, lambda: datasets(train=Stream(31)), hooks, max_epochs=2, every=2)
    streams = assert_exact(tmp_path, lambda: datasets(train=Stream(31), num_workers=2), hooks, max_epochs=2, every=9)
    assert len(streams) == 2 * 8


def shards(folder: Path) -> TarShardDataset:
    if not list(folder.glob("*.tar")):
        for shard in range(2):
            with tarfile.open(folder / f"{shard}.tar", "w") as archive:
                for number in range(shard * 15, shard * 15 + 15):
                    member = tarfile.TarInfo(f"{number:04d}.txt")
                    member.size = len(text := str(number).encode())
                    archive.addfile(member, io.BytesIO(text))
    return TarShardDataset(
        str(folder / "*.tar"), batch_size=4, decode=number_of, shuffle=True, buffer_size=16, num_replicas=1, rank=0
    )


def number_of(sample: Any) -> Any:
    return int(sample["txt"]), torch.zeros(())


class OwnGenerator(Plain):
    """A sampler with a generator that lasts as long as this."""

    def __init__(self) -> None:
        super().__init__(lambda: plain_loader(sampler=RandomSampler(Drawn(), generator=self.generator)))
        self.generator = torch.Generator().manual_seed(5)


def pair() -> dict[str, Any]:
    return {"a": plain_loader(Drawn(31), shuffle=True), "b": plain_loader(Drawn(11), shuffle=True)}


KINDS: dict[str, Callable[[Path], pl.LightningDataModule]] = {
    "shuffled": lambda _: wrapped(lambda: plain_loader(shuffle=True)),
    "generator": lambda _: wrapped(lambda: plain_loader(shuffle=True, generator=torch.Generator().manual_seed(5))),
    "sampler's generator": lambda _: SharedMemoryDataModule(datamodule=OwnGenerator(), num_workers=0),
    "tokens": lambda _: wrapped(lambda: DataLoader(Drawn(), batch_sampler=TokenBudgetBatchSampler(LENGTHS, 60))),
    "shards": lambda folder: datasets(train=shards(folder)),
    "wrapped shards": lambda folder: wrapped(lambda: DataLoader(shards(folder), 4)),
    "several": lambda _: wrapped(pair),
    "min_size": lambda _: wrapped(lambda: CombinedLoader(pair(), "min_size")),
    "max_size": lambda _: wrapped(lambda: CombinedLoader(pair(), "max_size")),
    "endless": lambda _: wrapped(
        lambda: CombinedLoader({"a": DataLoader(Stream(31), 4), "b": DataLoader(Stream(11), 4)}, "max_size")
    ),
}


@pytest.mark.parametrize("limits", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 21}], ids=["epochs", "steps"])
@pytest.mark.parametrize("kind", KINDS)
def test_goes_on_with_all_kinds_of_loaders(kind: str, limits: dict[str, Any], tmp_path: Path) -> None:
    seen = assert_exact(tmp_path, lambda: KINDS[kind](tmp_path), every=3, compare=numbers, **limits)
    first = [batch for epoch, _, batch in seen if epoch == 0]
    second = [batch for epoch, _, batch in seen if epoch == 1]
    assert kind == "endless" or numbers([(0, 0, each) for each in first]) != numbers([(0, 0, each) for each in second])


def test_goes_on_after_max_steps_has_stopped_it_within_an_epoch(tmp_path: Path) -> None:
    whole, _ = fit(datasets(), max_epochs=3)
    for steps in (5, 14, 20):
        saves = Saves(tmp_path, ("on_train_epoch_end", "on_train_end"))
        _, trainer = fit(datasets(), callbacks=[saves], max_epochs=-1, max_steps=steps)
        trainer.save_checkpoint(after := tmp_path / "after.ckpt")
        for place, path in (*(each[1:] for each in saves.saved), (steps, after)):
            for end in ({"max_epochs": -1, "max_steps": 42}, {"max_epochs": 3}):
                rest, _ = fit(datasets(), path, **end)
                assert rest.seen == whole.seen[place:], (steps, path, end)


@pytest.mark.parametrize("train", [Drawn(), Stream()], ids=["map", "stream"])
def test_goes_on_after_an_exception(train: Dataset[Any], tmp_path: Path) -> None:
    whole, _ = fit(datasets(train=train), max_epochs=2)
    for place in (0, 5, 13, 20):
        callback = OnExceptionCheckpoint(tmp_path, f"at{place}")
        with pytest.raises(ArithmeticError):
            fit(
                datasets(train=train),
                model=Remembers(place),
                callbacks=[callback],
                enable_checkpointing=True,
                max_epochs=2,
            )
        rest, _ = fit(datasets(train=train), tmp_path / f"at{place}.ckpt", max_epochs=2)
        assert numbers(rest.seen) == numbers(whole.seen[place:])


def test_goes_on_where_a_scheduler_has_asked_for_the_number_of_steps(tmp_path: Path) -> None:
    class Scheduled(Remembers):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.01)
            steps = int(self.trainer.estimated_stepping_batches)
            return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)]

    saves = Saves(tmp_path, BATCHES)
    whole, _ = fit(datasets(), model=Scheduled(), callbacks=[saves], max_epochs=2)
    for _, place, path in saves.saved[::4]:
        rest, _ = fit(datasets(), path, Scheduled(), max_epochs=2)
        assert rest.seen == whole.seen[place:]


class Records(pl.LightningDataModule):
    """Writes down which hooks are called."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.calls: list[str] = []
        self.classes, self.prepare_data_per_node = 7, False

    def _note(self, name: str) -> None:
        assert self.trainer is not None
        if self.calls[-1:] != [name]:
            self.calls.append(name)

    def prepare_data(self) -> None:
        self._note("prepare_data")

    def setup(self, stage: str) -> None:
        self._note(f"setup {TrainerFn(stage).value}")

    def teardown(self, stage: str) -> None:
        self._note(f"teardown {TrainerFn(stage).value}")

    def on_exception(self, exception: BaseException) -> None:
        self._note("on_exception")

    def state_dict(self) -> dict[str, Any]:
        self._note("state_dict")
        return {"own": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._note(f"load {state_dict}")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self._note("after_transfer")
        return batch

    def train_dataloader(self) -> Any:
        self._note("train_dataloader")
        return plain_loader(Drawn(8))

    def predict_dataloader(self) -> Any:
        return plain_loader(Drawn(8))


def test_hooks_and_attributes_of_a_wrapped_datamodule_are_in_use(tmp_path: Path) -> None:
    inner = Records(width=5)
    data: Any = SharedMemoryDataModule(datamodule=inner, num_workers=0)
    saves = Saves(tmp_path, ("on_train_end",))
    model, trainer = fit(data, callbacks=[saves], max_epochs=1)
    begin, end = ["prepare_data", "setup fit"], ["train_dataloader", "after_transfer"]
    assert inner.calls == [*begin, *end, "state_dict", "teardown fit"]
    assert (data.hparams.width, data.classes, data.prepare_data_per_node) == (5, 7, False)
    inner.calls.clear()
    fit(data, saves.saved[0][2], max_epochs=2)
    assert inner.calls == [*begin, "load {'own': 1}", *end, "teardown fit"]
    inner.calls.clear()
    with pytest.raises(ArithmeticError):
        fit(data, model=Remembers(1), max_epochs=1)
    assert inner.calls == [*begin, *end, "on_exception"]
    with pytest.raises(Exception, match="`test_dataloader` must be implemented"):
        trainer.test(model, datamodule=data)
    assert [each for batch in trainer.predict(model, datamodule=data) or [] for each in batch] == list(range(8))


def test_hooks_of_the_module_are_not_hidden() -> None:
    class Own(Remembers):
        transferred = 0

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            Own.transferred += 1
            return batch

    fit(datasets(), model=Own(), max_epochs=1)
    assert Own.transferred == 14


def test_loaders_of_other_classes_are_left_alone_and_others_keep_their_arguments() -> None:
    class Mine(DataLoader[Any]):
        pass

    def collate(samples: Any) -> Any:
        return samples

    for loader in (Mine(Drawn()), [1, 2]):
        assert wrapped(lambda loader=loader: loader).train_dataloader() == loader  # type: ignore[misc]
    given = plain_loader(collate_fn=collate, timeout=3, drop_last=True, sampler=RandomSampler(Drawn(), True, 9))
    for num_workers in (0, 2):
        ours = wrapped(lambda: given, num_workers).train_dataloader()
        assert type(ours) is SharedMemoryLoader
        assert (ours.collate_fn, ours.drop_last, ours.num_workers) == (collate, True, num_workers)
        assert ours.sampler is given.sampler
    data = SharedMemoryDataModule(datamodule=Plain(lambda: plain_loader(num_workers=1)))
    assert data.train_dataloader().num_workers == 1
    assert isinstance(data.train_dataloader().sampler, ElasticSampler)
    assert len(pickle.loads(pickle.dumps(datasets())).train_dataloader()) == 14
    copy.deepcopy(data)


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither datasets nor a datamodule"):
        SharedMemoryDataModule()
    with pytest.raises(ValueError, match="datamodule and val_dataset"):
        SharedMemoryDataModule(val_dataset=Drawn(), datamodule=Records())
    with pytest.raises(ValueError, match="batch_size=3, and the TarShardDataset"):
        datasets(train=shards(tmp_path), batch_size=3).train_dataloader()


class Children(pl.Callback):
    def __init__(self) -> None:
        self.counts: set[int] = set()

    def on_train_batch_end(self, *_: Any) -> None:
        self.counts.add(len(multiprocessing.active_children()))


def test_no_worker_outlives_a_run_and_their_number_is_bounded() -> None:
    before, children = len(multiprocessing.active_children()), Children()
    data = datasets(val_dataset=[Drawn(5), Drawn(3)], test_dataset=Drawn(5), predict_dataset=Drawn(5), num_workers=2)
    model, trainer = fit(data, callbacks=[children], max_epochs=3, reload_dataloaders_every_n_epochs=1)
    assert max(children.counts) - before == 2 * 3
    assert trainer.callbacks == [children]  # type: ignore[attr-defined]
    for run in (trainer.validate, trainer.test):
        assert len(multiprocessing.active_children()) == before
        run(model, datamodule=data, verbose=False)
    assert trainer.predict(model, datamodule=data) == [[0, 1, 2, 3], [4]]
    with pytest.raises(ArithmeticError):
        fit(data, model=Remembers(3), max_epochs=1)
    assert len(multiprocessing.active_children()) == before


class Counted(Drawn):
    """Counts, for all processes, how many samples were read."""

    def __init__(self) -> None:
        super().__init__(20)
        self.reads = multiprocessing.Value("i", 0)

    def __getitem__(self, index: int) -> Any:
        with self.reads.get_lock():
            self.reads.value += 1
        return super().__getitem__(index)


class AwaitsReads(pl.Callback):
    """At the end of the first epoch waits until samples of the second were read."""

    def __init__(self, dataset: Counted) -> None:
        self.dataset, self.were_ready = dataset, False

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        until = time.monotonic() + 20
        while trainer.current_epoch == 0 and not self.were_ready and time.monotonic() < until:
            self.were_ready = self.dataset.reads.value >= 20 + 2 * 4


def test_the_first_batches_of_an_epoch_are_read_before_it_begins() -> None:
    dataset = Counted()
    data = SharedMemoryDataModule(dataset, batch_size=4, num_workers=1)
    awaits = AwaitsReads(dataset)
    model, _ = fit(data, callbacks=[awaits], max_epochs=2)
    assert awaits.were_ready
    # Two epochs, what was read ahead for a third, and the first batch again, which draws; nothing else was read twice.
    assert dataset.reads.value <= 2 * 20 + 2 * 4 + 4
    assert sorted(number for _, _, batch in model.seen[5:] for number in batch[0]) == list(range(20))


def help_of(*arguments: str) -> str:
    """What the command prints."""
    script = [sys.executable, "-m", "lightning_hpc", "fit", *arguments]
    return subprocess.run(script, capture_output=True, text=True, timeout=120, check=True).stdout


def test_is_configured_from_yaml_with_a_wrapped_class_and_help_explains_it(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        """
        model: tests.data.modules.Remembers
        data:
          class_path: lightning_hpc.data.SharedMemoryDataModule
          init_args:
            datamodule: {class_path: tests.data.test_datamodule.Records, init_args: {width: 4}}
            num_workers: 2
            prefetch_factor: 3
        """
    )
    printed = help_of("--config", str(tmp_path / "config.yaml"), "--print_config")
    for line in ("class_path: tests.data.test_datamodule.Records", "width: 4", "num_workers: 2", "prefetch_factor: 3"):
        assert line in printed
    explained = " ".join(help_of("--data.help", "lightning_hpc.data.SharedMemoryDataModule").split())
    assert "0 where workers would only cost" in explained
    assert "auto" in explained
