"""Measures what a codec costs on this rank's device."""

import copy
import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lightning_hpc.comm.codecs.codec import BlockCodec, Codec, LinearCodec, Segment, SparseCodec
from lightning_hpc.comm.cost_model import CodecCost
from lightning_hpc.comm.layout import ParameterSpec, Part, Run
from lightning_hpc.comm.preconditioner import Preconditioner

_NUMEL = 2**18
_MAX_NUMEL = 2**23  # of a linear codec's matrices: enough to tell, and quick
_REPEATS = 3


def measure_codec(codec: Codec, parameters: Sequence[ParameterSpec], device: torch.device) -> CodecCost:
    """Encodes and decodes random numbers for some milliseconds. The codec itself keeps its state.

    Args:
        codec: Of any of the three kinds.
        parameters: The module's parameters, on whose shapes the size of a linear codec's message depends.
        device: Where the gradients will be.
    """
    generator = torch.Generator().manual_seed(0)
    scratch = copy.deepcopy(codec)
    if isinstance(scratch, BlockCodec):
        return _measure_block(scratch, torch.randn(_NUMEL, generator=generator).to(device))
    if isinstance(scratch, SparseCodec):
        return _measure_sparse(scratch, torch.randn(_NUMEL, generator=generator).to(device))
    assert isinstance(scratch, LinearCodec), codec
    segments = _sample(parameters)
    numel = sum(segment.numel for segment in segments)
    return _measure_linear(scratch, torch.randn(numel, generator=generator).to(device), segments)


def _measure_block(codec: BlockCodec, values: Tensor) -> CodecCost:
    blocks = values[: _NUMEL // codec.block * codec.block].view(-1, codec.block)
    pack, packed = _time(lambda: codec.encode(blocks), values.device)
    unpack, _ = _time(lambda: codec.decode(packed), values.device)
    if codec.preconditioned:
        more_to_pack, more_to_unpack = _measure_preconditioner(codec.block, blocks.view(-1))
        pack, unpack = pack + more_to_pack, unpack + more_to_unpack
    return _cost(codec, blocks.numel(), pack, unpack, scattered=2 * packed.numel())


def _measure_preconditioner(block: int, values: Tensor) -> tuple[float, float]:
    numel = values.numel()
    preconditioner = Preconditioner(block)
    run = Run((Part(ParameterSpec("", numel, 1), start=0, numel=numel, offset=0, source=0),), 0, numel)
    update, _ = _time(lambda: preconditioner.update(run, values), values.device)
    find, scale = _time(lambda: preconditioner.scale(run, values.device), values.device)
    apply, _ = _time(lambda: values / scale, values.device)
    return find + apply + update, apply


def _measure_sparse(codec: SparseCodec, values: Tensor) -> CodecCost:
    pack, packed = _time(lambda: codec.encode(values), values.device)
    if packed is None:  # too dense: such slices are sent as they are
        return _cost(codec, _NUMEL, pack, 0.0, scattered=8 * _NUMEL)
    unpack, _ = _time(lambda: codec.decode(packed, _NUMEL), values.device)
    return _cost(codec, _NUMEL, pack, unpack, gathered=packed.numel())


def _measure_linear(codec: LinearCodec, values: Tensor, segments: Sequence[Segment]) -> CodecCost:
    pack, message = _time(lambda: codec.encode(values, segments), values.device)
    unpack, _ = _time(lambda: codec.decode(message, segments), values.device)
    codec.advance(message, segments)  # the next message may be of another size
    sent = (message.numel() + codec.encode(values, segments).numel()) / 2
    return _cost(codec, max(values.numel(), 1), pack, unpack, scattered=8 * sent)


def _cost(
    codec: Codec, numel: int, pack: float, unpack: float, scattered: float = 0.0, gathered: float = 0.0
) -> CodecCost:
    # Error feedback decodes what was encoded, to see what is lost.
    return CodecCost(codec.name, scattered / numel, gathered / numel, (pack + unpack) / numel, unpack / numel, True)


def _sample(parameters: Sequence[ParameterSpec]) -> list[Segment]:
    """Parameters that stand for all: one of typical size first, however large, then others while there is room."""
    segments: list[Segment] = []
    taken = 0
    for spec in (*_typical(parameters), *parameters):
        is_new = all(spec.name != segment.name for segment in segments)
        if spec.numel and is_new and (not segments or taken + spec.numel <= _MAX_NUMEL):
            segments.append(Segment(spec.name, 0, spec.rows, spec.numel // spec.rows))
            taken += spec.numel
    return segments


def _typical(parameters: Sequence[ParameterSpec]) -> list[ParameterSpec]:
    """The parameter that the middle number lies in, when all are in the order of their size."""
    left = sum(spec.numel for spec in parameters) / 2
    for spec in sorted(parameters, key=lambda spec: spec.numel):
        left -= spec.numel
        if left <= 0:
            return [spec]
    return []


_Result = TypeVar("_Result")


def _time(function: Callable[[], _Result], device: torch.device) -> tuple[float, _Result]:
    """Seconds of the fastest of some calls, and what the last one returned."""
    fastest = math.inf
    for _ in range(_REPEATS):
        start = time.perf_counter()
        result = function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest = min(fastest, time.perf_counter() - start)
    return fastest, result
