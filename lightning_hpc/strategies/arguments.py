"""Checks the arguments of `HPCStrategy`, before any process is started."""

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hpc.comm.codecs import CODEC_NAMES, BlockCodec, Codec, make_codec
from lightning_hpc.comm.codecs.arguments import require_number
from lightning_hpc.comm.topology import Topology

AUTO_CODECS = ("bf16", "int8", "int4", "int3")
"""What ``compression="auto"`` may choose beside exact sums, the most exact first: those that trained as well as DDP, by
the table in docs/communication.md. Top-k, bitmask and low rank did not, under Adam."""


_BUCKETS = 5
_MIN_BUCKET_MIB, _MAX_BUCKET_MIB = 2.0, 25.0


def choose_bucket_mib(model_bytes: float) -> float:
    """MiB of a bucket of the hierarchy for ``bucket_cap_mb="auto"``. The flat all-reduce is best in DDP's own buckets.

    Five buckets: with fewer, the network waits for the first one, with more, their handling costs more than that.
    Measured with 13 MB of gradients on 2 x 2 emulated ranks at 200 Mbit/s; the bounds keep very small and very large
    models from buckets that are all latency, or many hundred. Smaller ones in front or at the end bring nothing. See
    docs/communication.md.
    """
    return min(max(model_bytes / _BUCKETS / 2**20, _MIN_BUCKET_MIB), _MAX_BUCKET_MIB)


def require_known(kwargs: dict[str, Any], constructors: Iterable[Callable[..., Any]]) -> None:
    """Raises TypeError for a misspelt argument, which torch would find only after all processes have started."""
    known = {name for constructor in constructors for name in inspect.signature(constructor).parameters}
    unknown = sorted(kwargs.keys() - known)
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else " and neither does DistributedDataParallel"
        raise TypeError(f"HPCStrategy takes no argument {unknown[0]!r}{hint}")


def require_sync_batchnorm_device(module: torch.nn.Module, device: torch.device) -> None:
    """Refuses ``sync_batchnorm=True`` where torch would refuse it in the middle of the first step.

    Raises:
        ValueError: If the module has batch normalisation, and the device is not CUDA.
    """
    if device.type != "cuda" and any(isinstance(each, _BatchNorm) for each in module.modules()):
        raise ValueError(
            f"sync_batchnorm=True needs CUDA: torch's SyncBatchNorm does not run on {device.type!r};"
            " set Trainer(sync_batchnorm=False), or use a normalisation without batch statistics"
        )


def parse_compression(compression: Any) -> list[Codec]:
    """The codecs that may be used.

    Raises:
        ValueError: If there is no such codec.
    """
    if isinstance(compression, Codec):
        _require_sound(compression)
        return [compression]
    if not isinstance(compression, str):
        hint = f"; write {compression.__name__}()" if isinstance(compression, type) else ""
        raise TypeError(f"compression={compression!r} is neither a name nor a Codec{hint}")
    if compression == "none":
        return []
    if compression == "auto":
        return [make_codec(name) for name in AUTO_CODECS]
    if compression not in CODEC_NAMES:
        names = ", ".join(("none", "auto", *CODEC_NAMES))
        raise ValueError(f"compression={compression!r} is not available; choose one of: {names}")
    return [make_codec(compression)]


def _require_sound(codec: Codec) -> None:
    """Finds here what would fail in the first step, on another thread."""
    if not isinstance(codec.name, str) or codec.name in ("", "none", "ddp", "auto"):
        raise ValueError(f"{codec!r} is called {codec.name!r}; give it a name that is not taken")
    if isinstance(codec, BlockCodec):
        for size in ("block", "block_bytes"):
            value = getattr(codec, size, None)
            require_number(f"{codec.name}.{size}", value, "an integer of at least 1", lambda one: one >= 1, Integral)
        zeros = torch.zeros(2, codec.block)
        packed = codec.encode(zeros)
        if packed.shape != (2, codec.block_bytes) or packed.dtype != torch.uint8:
            raise ValueError(
                f"codec {codec.name!r} encodes [2, {codec.block}] as {packed.dtype} {list(packed.shape)}; it must be"
                f" torch.uint8 [2, {codec.block_bytes}], by its block_bytes"
            )
        if not torch.equal(codec.decode(packed), zeros):
            raise ValueError(f"codec {codec.name!r} does not decode zeros to fp32 zeros of the same shape")


def parse_topology(topology: str | Path | Sequence[Any] | Topology) -> Topology | Literal["auto", "flat"]:
    """A topology, or what it will be found by.

    Raises:
        FileNotFoundError: If it is a path without a file.
        ValueError: If it is no topology.
    """
    if isinstance(topology, Topology):
        return topology
    if not isinstance(topology, (str, Path)):
        return Topology.from_lists(topology)
    if topology == "auto":
        return "auto"
    if topology == "flat":
        return "flat"
    return Topology.load(topology)


def parse_mebibytes(name: str, value: Any) -> float | None:
    """A size in MiB; None stands for "auto".

    Raises:
        ValueError: If it is neither a positive number nor "auto".
    """
    if isinstance(value, str) and value == "auto":
        return None
    try:
        mebibytes = float(value)
    except (TypeError, ValueError, OverflowError):
        mebibytes = math.nan
    if isinstance(value, (str, bool)) or not 2**-20 <= mebibytes <= 2**20:
        raise ValueError(f"{name}={value!r} must be 'auto' or a positive number of MiB, from a byte to a TiB")
    return mebibytes
