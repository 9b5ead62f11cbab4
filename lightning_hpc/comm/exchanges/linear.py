"""Crosses the outermost level with a linear codec."""

from typing import Any

import torch.distributed as dist
from typing_extensions import override

from lightning_hpc.comm.codecs.codec import LinearCodec, Segment
from lightning_hpc.comm.collectives import ExactSum
from lightning_hpc.comm.exchanges.coded import CodecExchange, FeedbackSettings
from lightning_hpc.comm.exchanges.exact import ExactExchange
from lightning_hpc.comm.groups import Level
from lightning_hpc.comm.slices import Slice
from lightning_hpc.comm.stats import CommStats


class LinearExchange(CodecExchange):
    """The messages are summed exactly; everybody maps the sum back."""

    def __init__(
        self,
        codec: LinearCodec,
        exact: ExactExchange,
        *,
        feedback: FeedbackSettings,
        level: Level | None,
        stats: CommStats,
    ) -> None:
        super().__init__(codec, exact, feedback=feedback, level=level, stats=stats)
        self._codec = codec
        self._sum = ExactSum(level, stats) if level is not None else None

    @override
    def start_scatter(self, item: Slice) -> dist.Work | None:
        if not item.values.numel():
            return None
        assert self._sum is not None
        segments = self._segments(item)
        run, idle = item.plan.run, self._idle(item.values, item.plan.run)
        corrected = self._corrected(item.values, self._feedback, run, item.poisoned, idle)
        item.carried = self._codec.encode(corrected, segments)
        if self._feedback is not None:
            lost = self._lost(corrected, self._codec.decode(item.carried, segments), self._feedback, run, idle)
            self._feedback.keep(run, lost, item.poisoned)
        item.received, work = self._sum.start_scatter(item.carried)
        return work

    @override
    def finish_scatter(self, item: Slice) -> None:
        if item.carried is not None:
            assert self._sum is not None
            self._sum.finish_scatter(item.carried, item.received)

    @override
    def start_gather(self, item: Slice) -> dist.Work | None:
        if item.carried is None:
            return None
        assert self._sum is not None
        return self._sum.start_gather(item.carried)

    @override
    def finish_gather(self, item: Slice) -> None:
        if item.carried is not None:
            segments = self._segments(item)
            self._deliver(self._codec.decode(item.carried, segments), item)
            self._codec.advance(item.carried, segments)

    @override
    def state_dict(self) -> dict[str, Any]:
        residuals = {} if self._feedback is None else self._feedback.state_dict()
        return {"residuals": residuals, "codec": self._codec.state_dict()}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._feedback is not None:
            self._feedback.load_state_dict(state.get("residuals", {}))
        self._codec.load_state_dict(state.get("codec", {}))

    def _segments(self, item: Slice) -> list[Segment]:
        parts = item.plan.run.parts
        return [
            Segment(part.parameter.name, part.start, part.parameter.rows, part.numel // part.parameter.rows)
            for part in parts
        ]
