"""Which samplers read the datasets of a DataModule, in shares of its Trainer's ranks."""

import os
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from lightning_hpc.data.sampling import ElasticSampler, EvenBatchSampler


class SamplerChoice:
    """Samplers that go on in another run, and on another number of ranks, where they can take the usual ones' place.

    Args:
        trainer: Whose ranks share the samples; None for one rank.
        seed: Of the order of training samples; None is that of ``seed_everything``, or 0.
    """

    def __init__(self, trainer: Any, seed: int | None) -> None:
        self._trainer, self._seed = trainer, seed

    def instead_of(self, loader: Any, *, is_training: bool) -> dict[str, Any]:
        """Arguments in place of those of a user's `DataLoader` that say which samples come when."""
        sizes = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if isinstance(loader.dataset, IterableDataset):
            return sizes
        sampler, batches = loader.sampler, loader.batch_sampler
        if batches is not None:
            if type(batches) is not BatchSampler:
                return {"batch_sampler": batches}
            # It may be the user's own; then the loader knows nothing of it.
            sampler, sizes = batches.sampler, {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
        if is_training:
            return {"sampler": self._elastic(sampler, loader.dataset, sizes["drop_last"]), **sizes}
        if type(sampler) is SequentialSampler and sizes["batch_size"] and not sizes["drop_last"]:
            return self.each_once(loader.dataset, sizes["batch_size"])
        return {"sampler": sampler, **sizes}

    def _elastic(self, sampler: Any, dataset: Any, drop_last: bool) -> Any:
        """In place of the usual samplers one that can go on in another run, and with another number of ranks."""
        if type(sampler) is DistributedSampler and sampler.dataset is dataset:
            return ElasticSampler(
                sampler.dataset, sampler.num_replicas, sampler.rank, sampler.shuffle, sampler.seed, sampler.drop_last
            )
        is_plain = getattr(sampler, "data_source", None) is dataset
        if is_plain and type(sampler) is SequentialSampler:
            return self.for_training(dataset, False, drop_last)
        if is_plain and type(sampler) is RandomSampler and _is_permutation(sampler):
            return self.for_training(dataset, True, drop_last)
        return sampler

    def for_training(self, dataset: Any, shuffle: bool, drop_last: bool) -> Any:
        """The sampler of a dataset that is trained with."""
        if self._trainer is not None and self._trainer.overfit_batches:
            return SequentialSampler(dataset)  # Lightning wants none but this, and shares it among ranks
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if self._seed is None else self._seed
        sampler = ElasticSampler(dataset, *self._ranks(), shuffle, seed, drop_last)
        if self._trainer is not None:
            sampler.set_epoch(self._trainer.fit_loop.epoch_progress.current.processed)  # Lightning does it after `iter`
        return sampler

    def each_once(self, dataset: Any, batch_size: int) -> dict[str, Any]:
        """Arguments of a loader that reads each sample once over all ranks, in as many batches on each."""
        ranks, rank = self._ranks()
        if ranks == 1 or isinstance(dataset, IterableDataset) or self._trainer.overfit_batches:
            return {"batch_size": batch_size}
        sampler = ElasticSampler(dataset, ranks, rank, shuffle=False, repeats=False)
        return {"batch_sampler": EvenBatchSampler(sampler, batch_size)}

    def _ranks(self) -> tuple[int, int]:
        """How many ranks share the samples, and which of them this is."""
        if self._trainer is None or not self._trainer._accelerator_connector.use_distributed_sampler:
            return 1, 0
        kwargs = self._trainer.distributed_sampler_kwargs
        return (kwargs["num_replicas"], kwargs["rank"]) if kwargs else (1, 0)


def _is_permutation(sampler: RandomSampler) -> bool:
    is_whole = sampler.num_samples == len(sampler.data_source) and not sampler.replacement
    return is_whole and sampler.generator is None
