"""`SharedMemoryDataModule`: any datasets, or any LightningDataModule, read by `SharedMemoryLoader`."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import EVAL_DATALOADERS, TRAIN_DATALOADERS
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
)
from typing_extensions import override

from lightning_hpc.data.loader import SharedMemoryLoader
from lightning_hpc.data.operator_graph import OperatorGraph
from lightning_hpc.data.placed_operators import require_transforms
from lightning_hpc.data.resumption import Resumption, watch
from lightning_hpc.data.sampler_choice import SamplerChoice
from lightning_hpc.data.sampling import EvenBatchSampler
from lightning_hpc.data.transfer import copying_device

_STAGES = ("train", "val", "test", "predict")
_BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class SharedMemoryDataModule(pl.LightningDataModule):
    """Reads datasets with workers that put batches into shared memory which is used again.

    A run that was stopped in the middle of an epoch goes on with exactly the batches that are left, from Lightning's
    own checkpoints. On another number of ranks, or with another batch size, exactly the samples that are left follow:
    with datasets given here, and where a wrapped DataModule uses the usual samplers, `ElasticSampler`,
    `TokenBudgetBatchSampler` or `TarShardDataset`.

    Evaluation reads each sample once, in as many batches on each rank. In training some samples are read twice where
    the ranks do not divide them, as with `DistributedSampler`, unless ``drop_last``.

    A wrapped DataModule keeps its hooks, hyperparameters and attributes, also under ``trainer.datamodule``. Its
    `DataLoader` objects are replaced, those of other classes are left alone. ``Trainer(use_distributed_sampler=False)``
    holds as usual: each rank reads what its loader says.

    Args:
        train_dataset: For ``fit``.
        val_dataset: For ``fit`` and ``validate``; or a list of several.
        test_dataset: For ``test``; or a list of several.
        predict_dataset: For ``predict``; or a list of several.
        datamodule: Instead of datasets: a DataModule whose `DataLoader` objects are replaced, with their arguments.
        batch_size: Samples in a batch and rank.
        shuffle: Whether the training samples come in a random order, another one in each epoch. Iterable datasets do
            this themselves.
        num_workers: Processes a loader; ``"auto"`` takes the number of a wrapped loader, or reads some batches and
            picks, 0 where workers would only cost.
        collate_fn: Makes a batch of samples, if the default does not.
        drop_last: Whether a last training batch that is not full is left out.
        prefetch_factor: Batches that each worker makes ahead.
        pin_memory: Whether batches are copied to page-locked memory, for CUDA.
        seed: Of the order of training samples; None is that of ``seed_everything``, or 0.
        operators: What is made of each sample, a mapping then, before it is collated: see `SharedMemoryLoader`. Steps
            and conditions find ``training``, which is true for training samples, among its values.
        device_transform: Called with each training batch on the device, before ``on_after_batch_transfer``: an
            augmentation. A Module is moved there.
        device_prefetch: Batches on their way to a CUDA device. 0 leaves copying to Lightning, as do hooks that have to
            see batches before that.

    Raises:
        TypeError: If a dataset or the DataModule is something else; or, when it is read, if ``device_transform`` meets
            a training loader that is left alone.
        ValueError: If there are both datasets and a DataModule, or neither; if something is set that the loaders of a
            DataModule have themselves; or, when it is read, if a dataset has
            another batch size than is given here, or if ``device_transform`` meets hooks that come before the device.
    """

    def __init__(
        self,
        # Without their type argument, or LightningCLI would take no arguments of the datasets.
        train_dataset: Dataset | None = None,  # type: ignore[type-arg]
        val_dataset: Dataset | list[Dataset] | None = None,  # type: ignore[type-arg]
        test_dataset: Dataset | list[Dataset] | None = None,  # type: ignore[type-arg]
        predict_dataset: Dataset | list[Dataset] | None = None,  # type: ignore[type-arg]
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
        operators: OperatorGraph | None = None,
        device_transform: Callable[[Any], Any] | None = None,
        device_prefetch: int = 2,
    ) -> None:
        super().__init__()
        self._datasets = dict(zip(_STAGES, (train_dataset, val_dataset, test_dataset, predict_dataset), strict=True))
        given = [name for name, dataset in self._datasets.items() if dataset is not None]
        if (datamodule is None) == (not given):
            what = f"datamodule and {given[0]}_dataset" if given else "neither datasets nor a datamodule"
            raise ValueError(f"SharedMemoryDataModule got {what}; give it datasets, or datamodule=…")
        for name, value in (*self._datasets.items(), ("datamodule", datamodule)):
            _require_kind(name, value)
        require_transforms(operators, device_transform)
        if datamodule is not None:
            _require_defaults(
                batch_size=(batch_size, 1),
                shuffle=(shuffle, True),
                collate_fn=(collate_fn, None),
                drop_last=(drop_last, False),
                pin_memory=(pin_memory, False),
            )
        self._wrapped = datamodule
        self._batch_size, self._shuffle, self._drop_last, self._seed = batch_size, shuffle, drop_last, seed
        self._num_workers, self._prefetch_factor = num_workers, prefetch_factor
        self._collate_fn, self._pin_memory = collate_fn, pin_memory
        if device_prefetch < 0 or (device_transform is not None and not device_prefetch):
            least = 0 if device_transform is None else 1
            raise ValueError(f"device_prefetch={device_prefetch!r} must be at least {least}: batches on their way")
        self._device_transform, self._device_prefetch = device_transform, device_prefetch
        self._operators = operators
        self._resumption = Resumption()
        self._define_hooks()

    def _define_hooks(self) -> None:
        """Defines those of Lightning's hooks that there is something for; Lightning looks which are overridden."""
        wrapped = self._wrapped
        for stage in _STAGES:
            name = f"{stage}_dataloader"
            if self._datasets[stage] is not None if wrapped is None else is_overridden(name, wrapped):
                self._define(name, partial(self._make_loaders, stage))
        if wrapped is None:
            return
        for name in ("prepare_data", *_BATCH_HOOKS):
            if is_overridden(name, wrapped):
                self._define(name, partial(self._call_wrapped, name))
        self.prepare_data_per_node = wrapped.prepare_data_per_node
        self.allow_zero_length_dataloader_with_multiple_devices = (
            wrapped.allow_zero_length_dataloader_with_multiple_devices
        )
        self._log_hyperparams = wrapped._log_hyperparams

    def _define(self, name: str, hook: Callable[..., Any]) -> None:
        if not is_overridden(name, self):  # a subclass may have its own
            setattr(self, name, hook)

    def _call_wrapped(self, name: str, *args: Any, **kwargs: Any) -> Any:
        assert self._wrapped is not None
        self._wrapped.trainer = self.trainer
        return getattr(self._wrapped, name)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        wrapped = self.__dict__.get("_wrapped")
        if wrapped is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(wrapped, name)

    @property
    @override
    def hparams(self) -> Any:
        return super().hparams if self._wrapped is None else self._wrapped.hparams

    @property
    @override
    def hparams_initial(self) -> Any:
        return super().hparams_initial if self._wrapped is None else self._wrapped.hparams_initial

    @property
    def batch_size(self) -> int:
        """Samples in a batch and rank; the DataModule's own, where one is wrapped."""
        return self._batch_size if self._wrapped is None else self._wrapped.batch_size  # type: ignore[attr-defined]

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        if self._wrapped is None:
            self._batch_size = size
        else:
            self._wrapped.batch_size = size  # type: ignore[attr-defined]

    @override
    def setup(self, stage: str) -> None:
        if stage == "fit":
            self._callbacks.append(self._resumption)
        if self._wrapped is not None:
            self._call_wrapped("setup", stage)

    @override
    def teardown(self, stage: str) -> None:
        self._close()
        if self._wrapped is not None:
            self._wrapped.teardown(stage)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._close()  # there is no teardown then
        if self._wrapped is not None:
            self._wrapped.on_exception(exception)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._wrapped is None else self._wrapped.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._wrapped is not None:
            self._wrapped.load_state_dict(state_dict)

    @property
    def _callbacks(self) -> list[pl.Callback]:
        callbacks: list[pl.Callback] = [] if self.trainer is None else self.trainer.callbacks  # type: ignore[attr-defined]
        return callbacks

    @property
    def _samplers(self) -> SamplerChoice:
        return SamplerChoice(self.trainer, self._seed)

    def _close(self) -> None:
        """Ends all workers; Lightning knows those of `DataLoader` only."""
        if self._resumption in self._callbacks:
            self._callbacks.remove(self._resumption)
        trainer: Any = self.trainer
        names = ("train_dataloader", "val_dataloaders", "test_dataloaders", "predict_dataloaders")
        for loader in tree_leaves([getattr(trainer, name, None) for name in names]):
            if isinstance(loader, SharedMemoryLoader):
                loader.close()

    def _make_loaders(self, stage: str) -> TRAIN_DATALOADERS | EVAL_DATALOADERS:
        is_training = stage == "train"
        if self._wrapped is not None:
            replace = partial(self._replaced, is_training)
            loaders = tree_map(replace, self._call_wrapped(f"{stage}_dataloader"))
        elif is_training:
            loaders = self._training_loader(self._datasets[stage])
        else:
            loaders = tree_map(self._evaluation_loader, self._datasets[stage])
        if is_training and self.trainer is not None:
            combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
            for loader in combined.flattened:
                if isinstance(loader, SharedMemoryLoader):
                    watch(loader, self.trainer)
        return loaders

    def _training_loader(self, dataset: Any) -> SharedMemoryLoader[Any]:
        kwargs: dict[str, Any] = {"batch_size": self._batch_size, "drop_last": self._drop_last}
        kwargs.update(device_transform=self._device_transform, operators=self._bound_operators(is_training=True))
        if isinstance(dataset, IterableDataset):
            return self._make(dataset, **kwargs)
        sampler = self._samplers.for_training(dataset, self._shuffle, self._drop_last)
        return self._make(dataset, sampler=sampler, **kwargs)

    def _evaluation_loader(self, dataset: Any) -> SharedMemoryLoader[Any]:
        operators = self._bound_operators(is_training=False)
        return self._make(dataset, operators=operators, **self._samplers.each_once(dataset, self._batch_size))

    def _bound_operators(self, *, is_training: bool) -> OperatorGraph | None:
        return None if self._operators is None else self._operators.bind(training=is_training)

    def _make(self, dataset: Any, **kwargs: Any) -> SharedMemoryLoader[Any]:
        kwargs.update(collate_fn=self._collate_fn, pin_memory=self._pin_memory)
        return self._loader(dataset, self._num_workers, self._prefetch_factor, **kwargs)

    def _loader(self, dataset: Any, num_workers: Any, prefetch_factor: int, **kwargs: Any) -> SharedMemoryLoader[Any]:
        kwargs["prefetch_factor"] = prefetch_factor if num_workers else None
        if self._device_prefetch:
            kwargs["device"] = copying_device(self, self._wrapped, kwargs.get("device_transform") is not None)
            kwargs["device_prefetch"] = self._device_prefetch
        loader: SharedMemoryLoader[Any] = SharedMemoryLoader(dataset, num_workers=num_workers, **kwargs)
        if self.trainer is not None:
            loader.share_processors(self.trainer.num_devices)
        if isinstance(loader.batch_sampler, EvenBatchSampler):
            # Lightning looks here whether the ranks share the samples already. `DataLoader` forbids to set it.
            vars(loader)["sampler"] = loader.batch_sampler.sampler
        return loader

    def _replaced(self, is_training: bool, loader: Any) -> Any:
        """A user's `DataLoader`, as a `SharedMemoryLoader`; what is anything else stays."""
        if isinstance(loader, CombinedLoader):
            loader.flattened = [self._replaced(is_training, each) for each in loader.flattened]
        if type(loader) is not DataLoader:
            ignored = {
                "operators": self._operators,
                "device_transform": self._device_transform if is_training else None,
            }
            for name, value in ignored.items():
                if value is not None and not isinstance(loader, CombinedLoader):
                    raise TypeError(
                        f"{name} does not reach the batches of a {type(loader).__name__}, which is left alone; use a"
                        " DataLoader, or transform its samples in the dataset, its batches in on_after_batch_transfer"
                    )
            return loader
        num_workers = self._num_workers
        kwargs: dict[str, Any] = {}
        if num_workers == "auto" and loader.num_workers:
            num_workers = loader.num_workers
        if num_workers:
            kwargs["multiprocessing_context"] = loader.multiprocessing_context
        names = ("collate_fn", "timeout", "worker_init_fn", "generator", "in_order", "pin_memory")
        kwargs.update({name: getattr(loader, name) for name in names})
        kwargs.update(self._samplers.instead_of(loader, is_training=is_training))
        kwargs["device_transform"] = self._device_transform if is_training else None
        kwargs["operators"] = self._bound_operators(is_training=is_training)
        prefetch_factor = loader.prefetch_factor or self._prefetch_factor
        return self._loader(loader.dataset, num_workers, prefetch_factor, **kwargs)


def _require_defaults(**arguments: tuple[Any, Any]) -> None:
    """Refuses what would be ignored, as the loaders of a wrapped DataModule have their own."""
    for name, (value, default) in arguments.items():
        if value != default:
            raise ValueError(
                f"{name}={value!r} is for datasets that are given here; with datamodule=… set it in its DataLoaders"
            )


def _require_kind(name: str, value: Any) -> None:
    """Finds here what would fail in a worker, or deep in Lightning."""
    if name == "datamodule":
        if value is not None and not isinstance(value, pl.LightningDataModule):
            hint = f"; write {value.__name__}()" if isinstance(value, type) else ""
            raise TypeError(f"datamodule={value!r} is no LightningDataModule of lightning.pytorch{hint}")
        return
    for each in value if name != "train" and isinstance(value, (list, tuple)) else [value]:
        if isinstance(each, (type, pl.LightningDataModule, DataLoader)):
            hint = "; pass it as datamodule=…" if isinstance(each, pl.LightningDataModule) else ""
            raise TypeError(f"{name}_dataset={each!r} is no dataset{hint}")
