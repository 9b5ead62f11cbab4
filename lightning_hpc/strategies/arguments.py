"""Checks the arguments of `HPCStrategy`, before any process is started."""

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning_hpc.comm.codecs import CODEC_NAMES, Codec, make_codec
from lightning_hpc.comm.topology import Topology

AUTO_CODECS = ("bf16", "int8", "int4", "int3")
"""What ``compression="auto"`` may choose beside exact sums, the most exact first: those that trained as well as DDP, by
the table in docs/communication.md. Top-k, bitmask and low rank did not, under Adam."""


def require_known(kwargs: dict[str, Any], constructors: Iterable[Callable[..., Any]]) -> None:
    """Raises TypeError for a misspelt argument, which torch would find only after all processes have started."""
    known = {name for constructor in constructors for name in inspect.signature(constructor).parameters}
    unknown = sorted(kwargs.keys() - known)
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else " and neither does DistributedDataParallel"
        raise TypeError(f"HPCStrategy takes no argument {unknown[0]!r}{hint}")


def parse_compression(compression: str | Codec) -> list[Codec]:
    """The codecs that may be used.

    Raises:
        ValueError: If there is no such codec.
    """
    if isinstance(compression, Codec):
        return [compression]
    if compression == "none":
        return []
    if compression == "auto":
        return [make_codec(name) for name in AUTO_CODECS]
    if compression not in CODEC_NAMES:
        names = ", ".join(("none", "auto", *CODEC_NAMES))
        raise ValueError(f"compression={compression!r} is not available; choose one of: {names}")
    return [make_codec(compression)]


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
