"""`SharedMemoryDataModule`: any datasets, or any LightningDataModule, read by `SharedMemoryLoader`."""

import os
from collections.abc import Callable
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.types import EVAL_DATALOADERS, TRAIN_DATALOADERS
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from typing_extensions import override

from lightning_hpc.data.loader import SharedMemoryLoader
from lightning_hpc.data.sampling import ElasticSampler, EvenBatchSampler


class SharedMemoryDataModule(pl.LightningDataModule):
    """Reads datasets with workers that put batches into shared memory which is used again.

    A run that was stopped in the middle of an epoch goes on with exactly the batches that are left, from Lightning's
    own checkpoints; with datasets that are given here, also on another number of ranks.

    Args:
        train_dataset: For ``fit``.
        val_dataset: For ``fit`` and ``validate``; or a list of several.
        test_dataset: For ``test``; or a list of several.
        predict_dataset: For ``predict``; or a list of several.
        datamodule: Instead of datasets: a DataModule whose `DataLoader` objects are replaced, with their arguments.
        batch_size: Samples in a batch and rank.
        shuffle: Whether the training samples come in a random order, another one in each epoch.
        num_workers: Processes a loader; ``"auto"`` reads some batches and picks, 0 where workers would only cost.
        collate_fn: Makes a batch of samples, if the default does not.
        drop_last: Whether a last training batch that is not full is left out.
        prefetch_factor: Batches that each worker makes ahead.
        pin_memory: Whether batches are copied to page-locked memory, for CUDA.
        seed: Of the order of training samples; None is that of ``seed_everything``, or 0.

    Raises:
        ValueError: If there are both datasets and a DataModule, or neither.
    """

    def __init__(
        self,
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Dataset[Any] | list[Dataset[Any]] | None = None,
        test_dataset: Dataset[Any] | list[Dataset[Any]] | None = None,
        predict_dataset: Dataset[Any] | list[Dataset[Any]] | None = None,
        *,
        datamodule: pl.LightningDataModule | None = None,
        batch_size: int = 1,
        shuffle: bool = True,
        num_workers: int | Literal["auto"] = "auto",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self._datasets = {
            "train": train_dataset,
            "val": val_dataset,
            "test": test_dataset,
            "predict": predict_dataset,
        }
        given = [name for name, dataset in self._datasets.items() if dataset is not None]
        if (datamodule is None) == (not given):
            what = f"datamodule and {given[0]}_dataset" if given else "neither datasets nor a datamodule"
            raise ValueError(f"SharedMemoryDataModule got {what}; give it datasets, or datamodule=…")
        self._wrapped = datamodule
        self._batch_size, self._shuffle = batch_size, shuffle
        self._seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        self._drop_last = drop_last
        self._settings: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory}
        self._collate_fn, self._prefetch_factor = collate_fn, prefetch_factor

    @override
    def prepare_data(self) -> None:
        if self._wrapped is not None:
            self._wrapped.prepare_data()

    @override
    def setup(self, stage: str) -> None:
        if self._wrapped is not None:
            self._wrapped.trainer = self.trainer
            self._wrapped.setup(stage)

    @override
    def teardown(self, stage: str) -> None:
        if self._wrapped is not None:
            self._wrapped.teardown(stage)

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._wrapped is not None:
            self._wrapped.on_exception(exception)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._wrapped is None else self._wrapped.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._wrapped is not None:
            self._wrapped.load_state_dict(state_dict)

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch if self._wrapped is None else self._wrapped.on_before_batch_transfer(batch, dataloader_idx)

    @override
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        if self._wrapped is None:
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        return self._wrapped.transfer_batch_to_device(batch, device, dataloader_idx)

    @override
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch if self._wrapped is None else self._wrapped.on_after_batch_transfer(batch, dataloader_idx)

    @override
    def train_dataloader(self) -> TRAIN_DATALOADERS:
        if self._wrapped is not None:
            loaders = tree_map(self._replaced, self._wrapped.train_dataloader())
        else:
            loaders = self._training_loader(self._datasets["train"])
        if isinstance(loaders, SharedMemoryLoader) and self.trainer is not None:
            loaders.count_consumed = self._count_consumed
        return loaders

    @override
    def val_dataloader(self) -> EVAL_DATALOADERS:
        return self._evaluation_loaders("val")

    @override
    def test_dataloader(self) -> EVAL_DATALOADERS:
        return self._evaluation_loaders("test")

    @override
    def predict_dataloader(self) -> EVAL_DATALOADERS:
        return self._evaluation_loaders("predict")

    def _evaluation_loaders(self, stage: str) -> EVAL_DATALOADERS:
        if self._wrapped is not None:
            return tree_map(self._replaced, getattr(self._wrapped, f"{stage}_dataloader")())
        datasets = self._datasets[stage]
        if isinstance(datasets, (list, tuple)):
            return [self._evaluation_loader(dataset) for dataset in datasets]
        return [] if datasets is None else self._evaluation_loader(datasets)

    def _training_loader(self, dataset: Any) -> SharedMemoryLoader[Any]:
        if isinstance(dataset, IterableDataset):
            return self._make(dataset, batch_size=self._batch_size, drop_last=self._drop_last)
        ranks, rank = self._ranks()
        sampler = ElasticSampler(dataset, ranks, rank, self._shuffle, self._seed, self._drop_last)
        return self._make(dataset, batch_size=self._batch_size, sampler=sampler, drop_last=self._drop_last)

    def _evaluation_loader(self, dataset: Any) -> SharedMemoryLoader[Any]:
        ranks, rank = self._ranks()
        if ranks == 1 or isinstance(dataset, IterableDataset):
            return self._make(dataset, batch_size=self._batch_size)
        sampler = ElasticSampler(dataset, ranks, rank, shuffle=False, repeats=False)
        return self._make(dataset, batch_sampler=EvenBatchSampler(sampler, self._batch_size))

    def _make(self, dataset: Any, **kwargs: Any) -> SharedMemoryLoader[Any]:
        loader: SharedMemoryLoader[Any] = SharedMemoryLoader(
            dataset, collate_fn=self._collate_fn, **self._worker_settings(self._prefetch_factor), **kwargs
        )
        return loader

    def _worker_settings(self, prefetch_factor: int | None) -> dict[str, Any]:
        has_workers = self._settings["num_workers"] != 0
        return {**self._settings, "prefetch_factor": prefetch_factor if has_workers else None}

    def _replaced(self, loader: Any) -> Any:
        """A user's `DataLoader`, as a `SharedMemoryLoader`; what is anything else stays."""
        if isinstance(loader, CombinedLoader):
            loader.flattened = [self._replaced(each) for each in loader.flattened]
        if type(loader) is not DataLoader:
            return loader
        kwargs: dict[str, Any] = {
            "collate_fn": loader.collate_fn,
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "generator": loader.generator,
            "in_order": loader.in_order,
            **self._worker_settings(loader.prefetch_factor or self._prefetch_factor),
            "pin_memory": loader.pin_memory,
        }
        if self._settings["num_workers"] == "auto" and loader.num_workers:
            kwargs["num_workers"] = loader.num_workers
            kwargs["multiprocessing_context"] = loader.multiprocessing_context
        if isinstance(loader.dataset, IterableDataset):
            kwargs.update(batch_size=loader.batch_size, drop_last=loader.drop_last)
        elif type(loader.batch_sampler) is BatchSampler:
            kwargs.update(batch_size=loader.batch_size, drop_last=loader.drop_last, sampler=self._elastic(loader))
        elif loader.batch_sampler is not None:
            kwargs.update(batch_sampler=loader.batch_sampler)
        else:
            kwargs.update(batch_size=None, sampler=loader.sampler)
        return SharedMemoryLoader(loader.dataset, **kwargs)

    def _elastic(self, loader: DataLoader[Any]) -> Any:
        """In place of the usual samplers one that can go on in another run, and with another number of ranks."""
        ranks, rank = self._ranks()
        shuffle = type(loader.sampler) is RandomSampler and loader.sampler.generator is None
        if not shuffle and type(loader.sampler) is not SequentialSampler:
            return loader.sampler
        return ElasticSampler(loader.dataset, ranks, rank, shuffle, self._seed, loader.drop_last)  # type: ignore[arg-type]

    def _ranks(self) -> tuple[int, int]:
        trainer: Any = self.trainer
        if trainer is None or not trainer._accelerator_connector.use_distributed_sampler:
            return 1, 0
        kwargs = trainer.distributed_sampler_kwargs
        return (kwargs["num_replicas"], kwargs["rank"]) if kwargs else (1, 0)

    def _count_consumed(self) -> tuple[int, bool]:
        assert self.trainer is not None
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress
        done = progress.current.processed
        return done, progress.is_last_batch and done == progress.current.ready
