"""How a slice crosses the outermost level: exactly, or packed by a codec."""

from lightning_hpc.comm.codecs.codec import BlockCodec, Codec, LinearCodec, SparseCodec
from lightning_hpc.comm.exchanges.block import BlockExchange
from lightning_hpc.comm.exchanges.coded import CodecExchange, FeedbackSettings
from lightning_hpc.comm.exchanges.exact import ExactExchange
from lightning_hpc.comm.exchanges.exchange import Exchange
from lightning_hpc.comm.exchanges.linear import LinearExchange
from lightning_hpc.comm.exchanges.sparse import SparseExchange
from lightning_hpc.comm.groups import Level
from lightning_hpc.comm.layout import Grain
from lightning_hpc.comm.stats import CommStats

__all__ = ["CodecExchange", "ExactExchange", "Exchange", "FeedbackSettings", "grain_of", "make_exchange"]

_MIN_SPARSE_NUMEL = 2**12  # below that, a slice of its own costs more than it saves


def make_exchange(
    codec: Codec, exact: ExactExchange, *, feedback: FeedbackSettings, level: Level | None, stats: CommStats
) -> CodecExchange:
    """The exchange for a codec of any of the three kinds.

    Raises:
        TypeError: If it is of none of them.
    """
    for kind, exchange in ((BlockCodec, BlockExchange), (SparseCodec, SparseExchange), (LinearCodec, LinearExchange)):
        if isinstance(codec, kind):
            return exchange(codec, exact, feedback=feedback, level=level, stats=stats)  # type: ignore[arg-type]
    raise TypeError(f"{codec!r} must subclass BlockCodec, SparseCodec or LinearCodec")


def grain_of(codec: Codec) -> Grain:
    """How finely slices for a codec may be cut."""
    if isinstance(codec, BlockCodec):
        return Grain(block=codec.block, min_numel=codec.block_bytes // 4)  # smaller ones would grow
    if isinstance(codec, SparseCodec):
        # One parameter a slice, since what is picked must not depend on what else is in the bucket.
        return Grain(block=1, min_numel=_MIN_SPARSE_NUMEL, grouped=False, crossing=False)
    assert isinstance(codec, LinearCodec), codec
    return Grain(block=None, crossing=False)
