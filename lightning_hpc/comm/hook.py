"""The communication hook that `HPCStrategy` registers with DistributedDataParallel, and the state behind it."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_hpc.comm.allreduce import HierarchicalAllReduce
from lightning_hpc.comm.codecs.codec import Codec
from lightning_hpc.comm.exchanges import CodecExchange, ExactExchange, FeedbackSettings, grain_of, make_exchange
from lightning_hpc.comm.exposed import CudaExposedClock, ExposedClock, HostExposedClock
from lightning_hpc.comm.flat import FlatAllReduce
from lightning_hpc.comm.groups import destroy_levels, keep_levels_for_ever, make_levels
from lightning_hpc.comm.layout import ParameterSpec
from lightning_hpc.comm.pipeline import Stage, StreamPipeline, ThreadPipeline
from lightning_hpc.comm.plans import Planner
from lightning_hpc.comm.roll_call import RollCall
from lightning_hpc.comm.stats import CommStats
from lightning_hpc.comm.topology import Topology

# Two, since a slice with a NaN or inf keeps what it has; ranks need not agree that there was one.
_FLUSHES = 2

_FEEDBACK = FeedbackSettings()
_PACKABLE = (torch.float32, torch.bfloat16, torch.float16)


class GradientReducer:
    """Averages the gradient buckets of one DistributedDataParallel module over all ranks of the job.

    Making one is a collective: all ranks call it with the same arguments, after `torch.distributed` was initialised.

    Args:
        topology: The ranks. With one level only, buckets go to the backend's own all-reduce, as in plain DDP.
        device: Where the gradients are.
        slice_bytes: Size of a slice. Small slices overlap better, large ones pay less latency.
        timeout: How long one collective may take, or None for the backend's default.
        stats: Where bytes, buckets and exposed time are counted.
        parameters: The module's parameters by name, in its order; needed for codecs.
        codecs: The codecs that may be used.
        feedback: What is done with what codecs lose.

    Attributes:
        specs: What describes each parameter, by the `id` of the parameter.
        on_bucket: Called with the number of gradients of each bucket that comes, if not None.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        device: torch.device,
        slice_bytes: int,
        timeout: timedelta | None,
        stats: CommStats,
        parameters: Mapping[str, Tensor] | None = None,
        codecs: Sequence[Codec] = (),
        feedback: FeedbackSettings = _FEEDBACK,
    ) -> None:
        self._stats = stats
        self._slice_bytes = slice_bytes
        assert dist.group.WORLD is not None, "torch.distributed is not initialised"
        self._flat = FlatAllReduce(dist.group.WORLD, stats)
        self._levels = make_levels(topology, timeout=timeout) if topology.depth > 1 else []
        specs = {name: ParameterSpec.of(name, parameter) for name, parameter in (parameters or {}).items()}
        self.specs = {id(parameter): specs[name] for name, parameter in (parameters or {}).items()}
        self._hierarchical: HierarchicalAllReduce | None = None
        self._planner: Planner | None = None
        if self._levels:
            self._planner = Planner(topology, self._levels, list(specs.values()))
            self._hierarchical = HierarchicalAllReduce(
                self._levels,
                world_size=topology.world_size,
                stats=stats,
                pipeline=partial(StreamPipeline, device=device) if device.type == "cuda" else _make_thread_pipeline,
            )
        # Ranks that are surplus in their node take no part in the outermost level.
        outermost = next((level for level in self._levels if not level.lanes), None)
        exact = ExactExchange(outermost, stats)
        self._exact: ExactExchange | None = exact
        self._exchanges: dict[str, CodecExchange] = {}
        self._grains = {codec.name: grain_of(codec) for codec in codecs}
        for codec in codecs:
            self._exchanges[codec.name] = make_exchange(codec, exact, feedback=feedback, level=outermost, stats=stats)
        self.on_bucket: Callable[[int], None] | None = None
        self._codec = self._next_codec = "none"
        self._flushes_left = 0
        self._clock: ExposedClock = (
            CudaExposedClock(stats, device) if device.type == "cuda" else HostExposedClock(stats)
        )

    @property
    def reduced_at(self) -> float | None:
        """When the last backward pass's gradients were all reduced; None on CUDA, where the host does not know."""
        return self._clock.reduced_at if isinstance(self._clock, HostExposedClock) else None

    @property
    def codec(self) -> str:
        """How the next bucket is reduced: see `use`."""
        return "ddp" if self._hierarchical is None else self._codec

    def use(self, codec: str) -> None:
        """Chooses the codec of the next backward passes; all ranks must do so between the same two of them.

        The first passes after a change send what the former codec had kept, and uncompressed.

        Args:
            codec: Name of one of the codecs, ``"none"`` for the exact hierarchy, or ``"ddp"`` for the flat all-reduce.
        """
        assert codec in self._exchanges or codec in ("none", "ddp"), codec
        self._flushes_left = _FLUSHES if self._codec in self._exchanges and codec != self._codec else 0
        self._next_codec = codec
        if not self._flushes_left:
            self._codec = codec

    def __call__(self, gradients: Tensor, is_last: bool, bucket: Sequence[ParameterSpec] = ()) -> Future[Tensor]:
        """Starts the reduction of one bucket.

        Args:
            gradients: Flat tensor of the bucket's gradients; sparse gradients of embeddings take the flat path.
            is_last: Whether the backward computation ends with this bucket.
            bucket: The bucket's parameters in its order; without them it is reduced exactly.

        Returns:
            A future of the same tensor, averaged in place.
        """
        if self.on_bucket is not None:
            self.on_bucket(gradients.numel())
        if gradients.layout is not torch.strided:
            self._count("none", "sparse")
            future = self._flat(gradients)
        elif self._hierarchical is None or self._codec == "ddp":
            self._count("none")
            future = self._flat(gradients)
        else:
            future = self._reduce(gradients, bucket, self._hierarchical)
        if is_last and self._flushes_left:
            self._flushes_left -= 1
            if not self._flushes_left:
                self._codec = self._next_codec
        return self._clock.follow(future, is_last)

    def state_dict(self) -> dict[str, Any]:
        """What the codecs keep from step to step on this rank: plain tensors in nested dictionaries."""
        return {name: exchange.state_dict() for name, exchange in self._exchanges.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave; all ranks must load theirs, or none."""
        for name, exchange in self._exchanges.items():
            exchange.load_state_dict(state.get(name, {}))

    def close(self) -> None:
        """Ends the executor and gives the process groups back."""
        if self._hierarchical is not None and not self._hierarchical.close():
            keep_levels_for_ever(self._levels)
        destroy_levels(self._levels)
        # Connections close with the last reference to their group, which peers that wait for us have to notice; this
        # object itself may live on in whatever holds the model.
        self._hierarchical = self._planner = self._exact = self.on_bucket = None
        self._levels = []
        self._exchanges.clear()

    def _reduce(
        self, gradients: Tensor, bucket: Sequence[ParameterSpec], hierarchical: HierarchicalAllReduce
    ) -> Future[Tensor]:
        planner, exact = self._planner, self._exact
        assert planner is not None
        assert exact is not None
        slice_numel = max(self._slice_bytes // gradients.element_size(), 1)
        if self._codec == "none" or gradients.dtype not in _PACKABLE or not bucket:
            self._count("none", None if self._codec == "none" else "dtype")
            numel = gradients.numel() * (2 if gradients.is_complex() else 1)
            if gradients.is_complex():
                slice_numel *= 2
            plans = planner.exact(numel, slice_numel)
            return hierarchical(gradients, plans, [exact] * len(plans), label=_label(bucket))
        self._count(self._codec)
        exchange = self._exchanges[self._codec]
        plans = planner.coded(bucket, self._grains[self._codec], slice_numel)
        exchanges = [exchange if plan.layout.compressed else exact for plan in plans]
        return hierarchical(gradients, plans, exchanges, label=_label(bucket), flush=self._flushes_left > 0)

    def _count(self, codec: str, fallback: str | None = None) -> None:
        self._stats.codecs[codec] += 1
        if fallback is not None:
            self._stats.fallbacks[fallback] += 1


def _make_thread_pipeline(stages: Sequence[Stage]) -> ThreadPipeline:
    roll_call = RollCall.of_default_group()
    return ThreadPipeline(stages, lambda stage, what: roll_call.report(what, stage.ranks))


def _label(bucket: Sequence[ParameterSpec]) -> str:
    if not bucket:
        return "a bucket"
    names = bucket[0].name if len(bucket) == 1 else f"{bucket[0].name} … {bucket[-1].name}"
    return f"the bucket of {names}"


# DistributedDataParallel compares these annotations with its own types. (mypy: not every build of torch has the name.)
def reduce_gradients(
    state: GradientReducer,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """The hook: starts the reduction of one bucket of gradients and returns at once."""
    parameters = bucket.parameters()
    # The buffer of complex gradients comes as real numbers, two for each, which no parameter's layout fits.
    is_packable = state.specs and not any(parameter.is_complex() for parameter in parameters)
    specs = [state.specs[id(parameter)] for parameter in parameters] if is_packable else ()
    return state(bucket.buffer(), bucket.is_last(), specs)
