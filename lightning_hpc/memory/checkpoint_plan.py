"""Which blocks to checkpoint: those that cost the least time while the saved bytes stay within a budget."""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_hpc.memory.peak_model import Bools, PeakModel, Share

# 2^12 choices take some 10 ms to try.
_MOST_BLOCKS_TO_TRY = 12
_TOLERANCE = 0.05
_MOST_STATES = 4096


@dataclass(frozen=True)
class CheckpointPlan:
    """A choice of blocks.

    Attributes:
        blocks: Names of those to checkpoint, in the order of the model.
        peak_bytes: The most bytes that will be saved at one time.
        plain_peak_bytes: The same without checkpointing.
        budget_bytes: How many there may be.
        extra_seconds: Time for the recomputations of a step.
    """

    blocks: tuple[str, ...]
    peak_bytes: int
    plain_peak_bytes: int
    budget_bytes: int
    extra_seconds: float

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget."""
        return self.peak_bytes <= self.budget_bytes


def choose_blocks(model: PeakModel, seconds: Sequence[float], budget_bytes: int) -> CheckpointPlan:
    """Finds the cheapest choice whose peak is within ``budget_bytes``, or one of a low peak if there is none.

    Up to twelve blocks, all choices are tried. With more, the blocks are gone through in the order of the model, and of
    the partial choices those are kept that no other beats in both bytes and time (the exact algorithm for knapsack
    problems of Nemhauser and Ullmann, 1969). Where there are too many, those of nearly equal time are merged (as in the
    scheme of Ibarra and Kim, 1975), so that the time is within 5 % of the least. That holds for blocks that run one
    after the other and hand a storage on to the next at most; for others the choice is only improved, one or two blocks
    at a time.

    Args:
        model: Says what each choice needs.
        seconds: Time to recompute each of the model's blocks.
        budget_bytes: The most bytes that may be saved at one time.
    """
    cost = np.asarray(seconds, dtype=np.float64)
    plans = _all_plans(len(cost)) if len(cost) <= _MOST_BLOCKS_TO_TRY else _candidates(model, cost, budget_bytes)
    peaks = model.peaks(plans)
    costs = plans @ cost
    excess = np.maximum(peaks - budget_bytes, 0)
    # Between equals fewer blocks, then the lower peak.
    best = np.lexsort((peaks, plans.sum(axis=1), costs, excess))[0]
    return CheckpointPlan(
        blocks=tuple(itertools.compress(model.blocks, plans[best])),
        peak_bytes=int(peaks[best]),
        plain_peak_bytes=model.peak_bytes(()),
        budget_bytes=budget_bytes,
        extra_seconds=float(costs[best]),
    )


def _all_plans(blocks: int) -> Bools:
    return np.array(list(itertools.product((False, True), repeat=blocks)), dtype=bool).reshape(-1, blocks)


def _candidates(model: PeakModel, cost: NDArray[np.float64], budget_bytes: int) -> Bools:
    """Some plans, the best ones among them: nothing, everything, and what the search has found, improved."""
    blocks = len(cost)
    extremes = np.array([[False] * blocks, [True] * blocks])
    plans = np.concatenate([extremes, _search(model, cost, budget_bytes)])
    fitting = plans[model.peaks(plans) <= budget_bytes]
    if not len(fitting):
        return plans
    best = _improved(model, fitting[np.argmin(fitting @ cost)], cost, budget_bytes)
    return np.concatenate([plans, best[None]])


def _improved(model: PeakModel, plan: Bools, cost: NDArray[np.float64], budget_bytes: int) -> Bools:
    """Changes the choice of one or two blocks at a time for as long as that helps."""
    blocks = len(cost)
    flips = np.eye(blocks, dtype=bool)
    flips = np.concatenate([flips, [flips[one] | flips[two] for one, two in itertools.combinations(range(blocks), 2)]])
    while True:
        plans = plan ^ flips
        # By more than rounding, or equals would take turns for ever.
        plans = plans[plans @ cost < (plan @ cost) * (1 - 1e-9)]
        plans = plans[model.peaks(plans) <= budget_bytes] if len(plans) else plans
        if not len(plans):
            return plan
        plan = plans[np.argmin(plans @ cost)]


def _search(model: PeakModel, cost: NDArray[np.float64], budget_bytes: int) -> Bools:
    """Plans that fit, the cheapest for blocks that run one after the other; none if nothing fits."""
    blocks = len(cost)
    by_last = _by_last_block(model.shares, blocks)
    plans = np.zeros((1, blocks), dtype=bool)
    live = np.zeros((1, model.moments), dtype=np.int64)
    for share in by_last[-1]:
        live += share.nbytes * share.alive(plans)
    open_moments = _open_moments(by_last, model.moments)
    for index in range(blocks):
        chosen = plans.copy()
        chosen[:, index] = True
        plans, live = np.concatenate([plans, chosen]), np.concatenate([live, live])
        for share in by_last[index]:
            live += share.nbytes * share.alive(plans)
        fits = live.max(axis=1, initial=0) <= budget_bytes
        plans, live = plans[fits], live[fits]
        later = live[:, open_moments[index]].max(axis=1, initial=0)
        kept = _undominated(plans[:, index], later, plans @ cost, _TOLERANCE / blocks)
        plans, live = plans[kept], live[kept]
    return plans


def _by_last_block(shares: list[Share], blocks: int) -> dict[int, list[Share]]:
    """Shares by the last block on which they depend; -1 for none."""
    found: dict[int, list[Share]] = {index: [] for index in range(-1, blocks)}
    for share in shares:
        found[max(share.blocks, default=-1)].append(share)
    return found


def _open_moments(by_last: dict[int, list[Share]], moments: int) -> list[Bools]:
    """For each block, the moments whose bytes depend on later blocks as well."""
    is_open = np.zeros(moments, dtype=bool)
    after = []
    for index in range(len(by_last) - 2, -1, -1):
        after.append(is_open.copy())
        for share in by_last[index]:
            is_open |= np.logical_or.reduce([*share.plain.values(), *share.checkpointed.values()])
    return after[::-1]


def _undominated(
    last_choice: Bools, later: NDArray[np.int64], cost: NDArray[np.float64], tolerance: float
) -> NDArray[np.int64]:
    """Indices of the states that no other one with the same last choice beats in bytes and cost."""
    order = np.lexsort((later, cost))
    least: defaultdict[bool, float] = defaultdict(lambda: math.inf)
    kept = []
    for index in order:
        if later[index] < least[last_choice[index]]:
            least[last_choice[index]] = later[index]
            kept.append(index)
    return np.array(_merged(kept, last_choice, cost, tolerance) if len(kept) > _MOST_STATES else kept, dtype=np.int64)


def _merged(kept: list[int], last_choice: Bools, cost: NDArray[np.float64], tolerance: float) -> list[int]:
    """Of states of nearly equal cost the one that needs the fewest bytes: the last, since bytes fall as costs rise."""
    merged = {}
    for index in kept:
        bucket = math.floor(math.log(cost[index]) / math.log1p(tolerance)) if cost[index] > 0 else -math.inf
        merged[bool(last_choice[index]), bucket] = index
    return list(merged.values())
