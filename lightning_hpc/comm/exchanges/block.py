"""Crosses the outermost level with a block codec."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hpc.comm.codecs.codec import BlockCodec
from lightning_hpc.comm.collectives import Hops, Scratch, sum_rows
from lightning_hpc.comm.error_feedback import ErrorFeedback
from lightning_hpc.comm.exchanges.coded import CodecExchange
from lightning_hpc.comm.exchanges.exact import ExactExchange
from lightning_hpc.comm.groups import Level
from lightning_hpc.comm.layout import Run
from lightning_hpc.comm.slices import Slice
from lightning_hpc.comm.stats import CommStats


class BlockExchange(CodecExchange):
    """Two hops: packets of each block to the rank that sums it, and its sum, packed again, to all.

    Both hops lose something, and the rank that loses it keeps it (two-way error feedback: Tang et al. 2019).
    """

    def __init__(
        self, codec: BlockCodec, exact: ExactExchange, *, error_feedback: bool, level: Level | None, stats: CommStats
    ) -> None:
        super().__init__(codec, exact, error_feedback=error_feedback, level=level, stats=stats)
        self._codec = codec
        self._feedback_of_sums = ErrorFeedback() if error_feedback else None
        self._hops = Hops(level, stats) if level is not None else None
        self._packets = Scratch()

    @override
    def start_scatter(self, item: Slice) -> dist.Work | None:
        if not item.values.numel():
            return None
        assert self._hops is not None
        packed = self._pack(item.values, self._feedback, item.plan.run, item)
        item.carried, work = self._hops.scatter(packed, self._packet_sizes(item))
        return work

    @override
    def finish_scatter(self, item: Slice) -> None:
        if item.carried is not None:
            item.carried = sum_rows(self._unpack(item.carried).view(self._level.size, -1))

    @override
    def start_gather(self, item: Slice) -> dist.Work | None:
        if item.carried is None:
            return None
        assert self._hops is not None
        packed = self._pack(item.carried, self._feedback_of_sums, item.plan.owned, item)
        sizes = self._packet_sizes(item)
        item.carried = self._packets(sum(sizes), packed)
        return self._hops.gather(packed, item.carried, sizes)

    @override
    def finish_gather(self, item: Slice) -> None:
        if item.carried is not None:
            self._deliver(self._unpack(item.carried), item)

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._feedback is None or self._feedback_of_sums is None:
            return {}
        return {"residuals": self._feedback.state_dict(), "residuals_of_sums": self._feedback_of_sums.state_dict()}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._feedback is not None and self._feedback_of_sums is not None:
            self._feedback.load_state_dict(state.get("residuals", {}))
            self._feedback_of_sums.load_state_dict(state.get("residuals_of_sums", {}))

    @override
    def _give_back(self, item: Slice) -> None:
        super()._give_back(item)
        if self._feedback_of_sums is not None:
            self._release(item, self._feedback_of_sums, item.plan.owned)

    def _pack(self, values: Tensor, feedback: ErrorFeedback | None, run: Run, item: Slice) -> Tensor:
        corrected = self._corrected(values, feedback, run, item.poisoned)
        packed = self._codec.encode(corrected.view(-1, self._codec.block))
        if feedback is not None:
            self._keep(corrected.sub_(self._codec.decode(packed).view(-1)), feedback, run, item.poisoned)
        return packed.view(-1)

    def _unpack(self, packed: Tensor) -> Tensor:
        return self._codec.decode(packed.view(-1, self._codec.block_bytes)).view(-1)

    def _packet_sizes(self, item: Slice) -> list[int]:
        return [numel // self._codec.block * self._codec.block_bytes for numel in item.plan.splits[-1]]
