"""Reading data: workers that put batches into shared memory, samplers that resume anywhere, shards, DataModule."""

from lightning_hpc.data.batching import TokenBudgetBatchSampler
from lightning_hpc.data.datamodule import SharedMemoryDataModule
from lightning_hpc.data.loader import SharedMemoryLoader
from lightning_hpc.data.operator_graph import OperatorGraph
from lightning_hpc.data.operators import OperatorHints, operator
from lightning_hpc.data.placement import Load, Placement, place
from lightning_hpc.data.sampling import ElasticSampler
from lightning_hpc.data.shards import TarShardDataset

__all__ = [
    "ElasticSampler",
    "Load",
    "OperatorGraph",
    "OperatorHints",
    "Placement",
    "SharedMemoryDataModule",
    "SharedMemoryLoader",
    "TarShardDataset",
    "TokenBudgetBatchSampler",
    "operator",
    "place",
]
