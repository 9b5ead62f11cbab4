"""Crosses the outermost level with a block codec."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hpc.comm.codecs.codec import BlockCodec
from lightning_hpc.comm.collectives import Hops, Scratch, sum_rows
from lightning_hpc.comm.error_feedback import ErrorFeedback
from lightning_hpc.comm.exchanges.coded import CodecExchange, FeedbackSettings
from lightning_hpc.comm.exchanges.exact import ExactExchange
from lightning_hpc.comm.groups import Level
from lightning_hpc.comm.layout import Run
from lightning_hpc.comm.preconditioner import Preconditioner
from lightning_hpc.comm.slices import Slice
from lightning_hpc.comm.stats import CommStats


class BlockExchange(CodecExchange):
    """Two hops: packets of each block to the rank that sums it, and its sum, packed again, to all.

    With the packets goes each rank's word whether it can pack the slice, since in the first hop all hear from all.
    Both hops lose something, and the rank that loses it keeps it (two-way error feedback: Tang et al. 2019).
    """

    def __init__(
        self,
        codec: BlockCodec,
        exact: ExactExchange,
        *,
        feedback: FeedbackSettings,
        level: Level | None,
        stats: CommStats,
    ) -> None:
        super().__init__(codec, exact, feedback=feedback, level=level, stats=stats)
        self._codec = codec
        self._feedback_of_sums = ErrorFeedback() if feedback.is_used else None
        self._preconditioner = Preconditioner(codec.block) if codec.preconditioned else None
        self._hops = Hops(level, stats) if level is not None else None
        self._packets = Scratch()

    @override
    def agree(self, item: Slice) -> Tensor | None:
        # Otherwise the packets of the first hop say it, which saves a message.
        return super().agree(item) if item.flush else None

    @override
    def start_scatter(self, item: Slice) -> dist.Work | None:
        values = item.values
        if not values.numel():
            return None
        assert self._hops is not None
        is_finite = self._is_finite(values)
        if self._preconditioner is not None:
            item.scale = self._preconditioner.scale(item.plan.run, values.device)
        packed, item.lost = self._pack(values, self._feedback, item.plan.run, item, is_finite)
        packets = self._add_word(packed, ~is_finite, item)
        item.carried, work = self._hops.scatter(packets, [size + 1 for size in self._packet_sizes(item)])
        return work

    @override
    def finish_scatter(self, item: Slice) -> None:
        if item.carried is None:
            return
        packed, words = item.carried[:, :-1], item.carried[:, -1]
        if self._take_word(item, words.any()):
            item.carried = None
            return
        if self._feedback is not None and item.lost is not None:
            self._feedback.keep(item.plan.run, item.lost, item.poisoned)
        item.carried = sum_rows(self._unpack(packed.reshape(-1)).view(self._level.size, -1))
        if item.scale is not None:
            item.carried.mul_(_within(item.scale, item.plan.owned, item))

    @override
    def start_gather(self, item: Slice) -> dist.Work | None:
        if item.refused:
            return self._exact.start_late(item)
        if item.carried is None:
            return None
        assert self._hops is not None
        packed, lost = self._pack(item.carried, self._feedback_of_sums, item.plan.owned, item, None)
        if self._feedback_of_sums is not None and lost is not None:
            self._feedback_of_sums.keep(item.plan.owned, lost, item.poisoned)
        sizes = self._packet_sizes(item)
        item.carried = self._packets(sum(sizes), packed)
        return self._hops.gather(packed.view(-1), item.carried, sizes)

    @override
    def finish_gather(self, item: Slice) -> None:
        if item.refused:
            self._exact.finish_late(item)
        elif item.carried is not None:
            sums = self._unpack(item.carried)
            if self._preconditioner is not None and item.scale is not None:
                self._preconditioner.update(item.plan.run, sums.mul_(item.scale), item.poisoned)
            self._deliver(sums, item)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {name: kept.state_dict() for name, kept in self._kept().items()}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, kept in self._kept().items():
            kept.load_state_dict(state.get(name, {}))

    def _kept(self) -> dict[str, ErrorFeedback | Preconditioner]:
        kept = {
            "residuals": self._feedback,
            "residuals_of_sums": self._feedback_of_sums,
            "magnitudes": self._preconditioner,
        }
        return {name: each for name, each in kept.items() if each is not None}

    @override
    def _give_back(self, item: Slice) -> None:
        super()._give_back(item)
        if self._feedback_of_sums is not None:
            self._release(item, self._feedback_of_sums, item.plan.owned)

    # A rank may own nothing of a small slice. A codec is never given zero blocks, which are an easy thing to trip over.

    def _pack(
        self, values: Tensor, feedback: ErrorFeedback | None, run: Run, item: Slice, is_finite: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Packed blocks, uint8 ``[n, block_bytes]``, and what is lost; zeros where the values are not finite."""
        if not values.numel():
            return values.new_empty((0, self._codec.block_bytes), dtype=torch.uint8), None
        idle = self._idle(values, run)
        corrected = self._corrected(values, feedback, run, None if is_finite is None else ~is_finite, idle)
        scale = None if item.scale is None else _within(item.scale, run, item)
        scaled = corrected if scale is None else corrected / scale
        packed = self._codec.encode(scaled.view(-1, self._codec.block))
        if feedback is None:
            return packed, None
        decoded = self._codec.decode(packed).view(-1)
        return packed, self._lost(corrected, decoded if scale is None else decoded.mul_(scale), feedback, run, idle)

    def _add_word(self, packed: Tensor, refuses: Tensor, item: Slice) -> Tensor:
        """Puts a byte behind each rank's packet that says whether this rank refuses to pack the slice."""
        word = refuses.to(torch.uint8).view(1)
        packets = packed.view(-1).split(self._packet_sizes(item))
        return torch.cat([piece for packet in packets for piece in (packet, word)])

    def _unpack(self, packed: Tensor) -> Tensor:
        if not packed.numel():
            return packed.new_empty(0, dtype=torch.float32)
        return self._codec.decode(packed.view(-1, self._codec.block_bytes)).view(-1)

    def _packet_sizes(self, item: Slice) -> list[int]:
        return [numel // self._codec.block * self._codec.block_bytes for numel in item.plan.splits[-1]]


def _within(scale: Tensor, run: Run, item: Slice) -> Tensor:
    """The scale of what this rank brings to the outermost level, or of the part of it that it sums there."""
    start = item.plan.run.start
    return scale[run.start - start : run.stop - start]
