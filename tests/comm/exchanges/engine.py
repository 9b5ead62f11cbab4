"""Drives a `GradientReducer` as DistributedDataParallel would, on parameters of every awkward size."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hpc.comm.codecs import CODEC_NAMES, BlockCodec, Codec, make_codec
from lightning_hpc.comm.exchanges import FeedbackSettings
from lightning_hpc.comm.hook import GradientReducer
from lightning_hpc.comm.layout import ParameterSpec
from lightning_hpc.comm.stats import CommStats
from lightning_hpc.comm.topology import Topology


class SignCodec(BlockCodec):
    """What a user may write: the sign of each number, and the mean magnitude of a block (1-bit SGD).

    Zeros beside other numbers do not become zero again, which is allowed.
    """

    name = "sign"
    block = 104
    block_bytes = block // 8 + 4

    def encode(self, blocks: Tensor) -> Tensor:
        scale = blocks.abs().mean(1, keepdim=True)
        bits = (blocks >= 0).view(len(blocks), -1, 8) << torch.arange(8)
        return torch.cat([bits.sum(2).to(torch.uint8), scale.view(torch.uint8)], 1)

    def decode(self, packed: Tensor) -> Tensor:
        bits = packed[:, : self.block // 8, None] >> torch.arange(8) & 1
        scale = packed[:, self.block // 8 :].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return (2.0 * bits.flatten(1) - 1) * scale


ALL_CODECS = (*CODEC_NAMES, SignCodec.name)

SHAPES: dict[str, tuple[int, ...]] = {
    "head.bias": (7,),
    "conv.weight": (16, 8, 3, 3),
    "empty": (0, 3),
    "wide.weight": (96, 71),
    "vector": (4999,),
    "temperature": (),
    "square.weight": (64, 64),
}
SPECS = {
    name: ParameterSpec(name, torch.Size(shape).numel(), shape[0] if shape else 1) for name, shape in SHAPES.items()
}
Buckets = Sequence[Sequence[str]]
BUCKETS: Buckets = [["square.weight", "temperature", "vector"], ["wide.weight", "empty", "conv.weight", "head.bias"]]
OTHER_BUCKETS: Buckets = [
    ["conv.weight", "vector", "head.bias"],
    ["empty"],
    ["temperature", "square.weight", "wide.weight"],
]
SINGLE_BUCKETS: Buckets = [[name] for name in SHAPES]

Gradients = dict[str, Tensor]


def all_codecs() -> list[Codec]:
    return [*map(make_codec, CODEC_NAMES), SignCodec()]


def gradients_of(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Gradients:
    """What a rank brings in a step: normal numbers, in each parameter of another magnitude."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {
        name: (torch.randn(spec.numel, generator=generator) * 10.0 ** (index - 3)).to(dtype)
        for index, (name, spec) in enumerate(SPECS.items())
    }


def flatten(gradients: Mapping[str, Tensor]) -> Tensor:
    """In the order of the module."""
    return torch.cat([gradients[name] for name in SHAPES])


def mean_of(step: int, world_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The true mean of a step, in fp64."""
    return torch.stack([flatten(gradients_of(rank, step, dtype)).double() for rank in range(world_size)]).mean(0)


class Engine:
    """One rank's reducer with all codecs."""

    def __init__(
        self,
        domains: list[Any],
        *,
        slice_bytes: int = 8000,
        feedback: FeedbackSettings | None = None,
        codecs: Sequence[Codec] | None = None,
    ) -> None:
        self.topology = Topology.from_lists(domains)
        self.world_size = self.topology.world_size
        self.stats = CommStats()
        self.slice_bytes = slice_bytes
        self.reducer = GradientReducer(
            self.topology,
            device=torch.device("cpu"),
            slice_bytes=slice_bytes,
            timeout=timedelta(seconds=60),
            stats=self.stats,
            parameters={name: torch.empty(shape) for name, shape in SHAPES.items()},
            codecs=all_codecs() if codecs is None else codecs,
            feedback=feedback or FeedbackSettings(),
        )

    def step(self, codec: str, gradients: Gradients, buckets: Buckets = BUCKETS) -> Tensor:
        """Reduces all buckets at once and returns what arrived, in the order of the module.

        Other than `GradientReducer.use`, this changes the codec without sending what the former one had kept.
        """
        self.reducer._codec, self.reducer._flushing = codec, False
        return self.pass_(gradients, buckets)

    def pass_(self, gradients: Gradients, buckets: Buckets = BUCKETS) -> Tensor:
        """As `step`, with the codec in use."""
        flat = [torch.cat([gradients[name] for name in bucket]) for bucket in buckets]
        futures = [
            self.reducer(tensor, index == len(buckets) - 1, [SPECS[name] for name in buckets[index]])
            for index, tensor in enumerate(flat)
        ]
        arrived: Gradients = {}
        for bucket, future in zip(buckets, futures, strict=True):
            parts = future.wait().split([SPECS[name].numel for name in bucket])
            arrived.update(zip(bucket, parts, strict=True))
        return flatten({**dict.fromkeys(SHAPES, torch.zeros(0)), **arrived})

    def runs(self, codec: str, buckets: Buckets = BUCKETS) -> list[list[tuple[str, int, int]]]:
        """What this rank packs, by slice: parameter's name, first element and number of elements."""
        grain = self.reducer._grains[codec]
        plans = [
            plan
            for bucket in buckets
            for plan in self.reducer._planner.coded([SPECS[name] for name in bucket], grain, self.slice_bytes // 4)
            if plan.layout.compressed
        ]
        return [[(part.parameter.name, part.start, part.numel) for part in plan.run.parts] for plan in plans]

    def residuals(self, codec: str) -> dict[str, Tensor]:
        """A copy of all that this rank keeps for the codec, by one flat key each."""
        return dict(_flat_state(self.reducer.state_dict()[codec]))

    def close(self) -> None:
        dist.barrier()
        self.reducer.close()


def _flat_state(state: Mapping[str, Any], prefix: str = "") -> Any:
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _flat_state(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value.clone()


def place(parts: Mapping[str, Tensor]) -> Tensor:
    """Sums residuals, with keys as `Engine.residuals` has them, into a flat tensor in the order of the module."""
    total = {name: torch.zeros(spec.numel, dtype=torch.float64) for name, spec in SPECS.items()}
    for key, value in parts.items():
        kind, _, rest = key.partition("/")
        if kind.startswith("residuals"):
            start, _, name = rest.partition(":")
            total[name][int(start) : int(start) + value.numel()] += value
    return flatten(total)


def same_on_all_ranks(tensor: Tensor) -> bool:
    """Whether all ranks have the same bits."""
    mine = tensor.contiguous().view(torch.uint8)
    others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(others, mine)
    return all(torch.equal(mine, other) for other in others)


def summed(tensor: Tensor) -> Tensor:
    """The sum over all ranks."""
    dist.all_reduce(tensor)
    return tensor


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
