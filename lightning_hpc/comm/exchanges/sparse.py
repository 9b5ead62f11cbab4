"""Crosses the outermost level with a sparse codec."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hpc.comm.codecs.codec import SparseCodec
from lightning_hpc.comm.collectives import Hops, Scratch
from lightning_hpc.comm.exchanges.coded import DENSE, CodecExchange, FeedbackSettings
from lightning_hpc.comm.exchanges.exact import ExactExchange
from lightning_hpc.comm.groups import Level
from lightning_hpc.comm.slices import Slice
from lightning_hpc.comm.stats import CommStats


class SparseExchange(CodecExchange):
    """One hop: every rank's packet to every other. Packets differ in size, which is agreed on beforehand."""

    def __init__(
        self,
        codec: SparseCodec,
        exact: ExactExchange,
        *,
        feedback: FeedbackSettings,
        level: Level | None,
        stats: CommStats,
    ) -> None:
        super().__init__(codec, exact, feedback=feedback, level=level, stats=stats)
        self._codec = codec
        self._hops = Hops(level, stats) if level is not None else None
        self._packets = Scratch()

    @override
    def agree(self, item: Slice) -> Tensor | None:
        word = super().agree(item)
        if word is None or int(word) < 0:
            return word
        idle = self._idle(item.values, item.plan.run)
        corrected = self._corrected(item.values, self._feedback, item.plan.run, item.poisoned, idle)
        item.carried = self._codec.encode(corrected)
        return word.fill_(DENSE if item.carried is None else item.carried.numel())

    @override
    def agreed(self, item: Slice, words: Tensor) -> None:
        super().agreed(item, words.cpu())  # the sizes are needed on the host
        item.sizes = words.tolist()

    @override
    def start_scatter(self, item: Slice) -> dist.Work | None:
        packed = item.carried
        if packed is None:
            return None
        if self._feedback is not None:
            run, idle = item.plan.run, self._idle(item.values, item.plan.run)
            corrected = self._corrected(item.values, self._feedback, run, item.poisoned, idle)
            decoded = self._codec.decode(packed, corrected.numel())
            self._feedback.keep(run, self._lost(corrected, decoded, self._feedback, run, idle))
        assert self._hops is not None
        item.carried = self._packets(sum(item.sizes), packed)
        # On the group of this stage: `down` belongs to the next one, which gathers slices that are not compressed.
        return self._hops.gather(packed, item.carried, item.sizes, self._level.up)

    @override
    def finish_scatter(self, item: Slice) -> None:
        if item.carried is None:
            return
        first, *others = item.carried.split(item.sizes)
        total = self._codec.decode(first, item.values.numel())
        for packed in others:
            total.add_(self._codec.decode(packed, total.numel()))
        self._deliver(total, item)

    @override
    def start_gather(self, item: Slice) -> dist.Work | None:
        return None

    @override
    def finish_gather(self, item: Slice) -> None:
        """The sum is in place."""

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._feedback is None else {"residuals": self._feedback.state_dict()}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._feedback is not None:
            self._feedback.load_state_dict(state.get("residuals", {}))
