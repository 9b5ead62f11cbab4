"""`compression="auto"`: times steps, asks the policy, and carries its orders to all ranks."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from lightning_hpc.comm.cost_model import CodecCost, predict_choices
from lightning_hpc.comm.hook import GradientReducer
from lightning_hpc.comm.policy import CodecPolicy, Order
from lightning_hpc.comm.stats import CommStats, Decision
from lightning_hpc.comm.step_observer import StepObserver
from lightning_hpc.comm.topology import Topology

# The first step still has the buckets that DistributedDataParallel made without knowing the order of the gradients, and
# rebuilding them is part of the second.
_OBSERVED_STEPS = 4


class CodecTuner:
    """Chooses among the codecs of a reducer while the training goes on.

    Rank 0 measures and decides; the others wait for its order at the end of each order's last step, so that all change
    at the same step. Every rank calls `finish_step` once an optimizer step.

    Args:
        reducer: Whose codec is chosen.
        topology: With the measured speed of its levels.
        costs: Of the codecs that may be chosen, the most exact first, beside the flat ring and the exact hierarchy.
        slice_numel: Numbers in a slice.
        group: All ranks.
        device: Where its tensors must be.
        stats: Takes the decisions.
        announce: Called on rank 0 with a line for the log.
    """

    def __init__(
        self,
        reducer: GradientReducer,
        *,
        topology: Topology,
        costs: Sequence[CodecCost],
        slice_numel: int,
        group: dist.ProcessGroup,
        device: torch.device,
        stats: CommStats,
        announce: Callable[[str], None],
    ) -> None:
        self._reducer, self._topology, self._slice_numel = reducer, topology, slice_numel
        self._costs = [CodecCost(), *costs]
        self._choices = ["ddp", *(cost.name for cost in self._costs)]
        self._group, self._device = group, device
        self._stats, self._announce = stats, announce
        self._policy: CodecPolicy | None = None
        self._observer = StepObserver(reducer, stats)
        self._seconds: list[float] = []
        self._settled = False
        # With the fewest bytes, computation is least held up by communication, while the host is as busy with it as it
        # will be.
        self._lightest = min(self._costs, key=lambda cost: cost.scattered_bytes + 2 * cost.gathered_bytes).name
        self._follow(Order(self._lightest, _OBSERVED_STEPS))

    def finish_step(self) -> None:
        """Takes note of a step; at the end of an order, gets the next one."""
        seconds = self._observer.finish_step()
        if seconds is not None:
            self._seconds.append(seconds)
        self._left -= 1
        if not self._left:
            order = self._next_order() if self._group.rank() == 0 else None
            self._follow(self._share(order))

    def _follow(self, order: Order) -> None:
        self._left = order.steps
        self._seconds.clear()
        self._reducer.use(order.choice)

    def _share(self, order: Order | None) -> Order:
        words = torch.zeros(2, dtype=torch.int64)
        if order is not None:
            words[0], words[1] = self._choices.index(order.choice), order.steps
        words = words.to(self._device)
        dist.broadcast(words, group=self._group, group_src=0)
        choice, steps = words.tolist()
        return Order(self._choices[choice], steps)

    def _next_order(self) -> Order:
        workload = self._observer.take_workload()
        if self._policy is None:
            if workload is None:  # no bucket came by
                return Order(self._lightest, _OBSERVED_STEPS)
            predictions = predict_choices(workload, self._topology, self._costs, self._slice_numel)
            self._policy = CodecPolicy(self._choices, {item.name: item.step_seconds for item in predictions})
            return self._policy.start()
        order = self._policy.next(self._seconds)
        if self._policy.is_settled and not self._settled:
            self._record(order, self._policy)
        self._settled = self._policy.is_settled
        return order

    def _record(self, order: Order, policy: CodecPolicy) -> None:
        decision = Decision(
            self._stats.steps, order.choice, policy.reason(), dict(policy.predictions), dict(policy.measured)
        )
        self._stats.decisions.append(decision)
        self._announce(decision.reason)
