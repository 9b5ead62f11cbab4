"""What the peak of saved bytes would be for any choice of checkpointed blocks, from one measured step."""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_hpc.memory.saved_activations import Holding

Bools = NDArray[np.bool_]
_PLANS_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class Share:
    """Bytes of storages that are alive at the same moments whatever is chosen.

    Attributes:
        nbytes: Their bytes.
        always: Moments, one bool each, at which something outside of the blocks keeps them.
        plain: Moments at which a block keeps them if it is not checkpointed, by the block's index.
        checkpointed: The same if it is.
    """

    nbytes: int
    always: Bools
    plain: dict[int, Bools]
    checkpointed: dict[int, Bools]

    def alive(self, plans: Bools) -> Bools:
        """Moments at which they are alive, of shape (plans, moments), for ``plans`` of shape (plans, blocks)."""
        alive = np.repeat(self.always[None], len(plans), axis=0)
        for index, moments in self.plain.items():
            alive |= ~plans[:, index, None] & moments
        for index, moments in self.checkpointed.items():
            alive |= plans[:, index, None] & moments
        return alive

    @property
    def blocks(self) -> set[int]:
        """Indices of the blocks on which it depends."""
        return {*self.plain, *self.checkpointed}


class PeakModel:
    """Replays the holdings of a step in which all blocks were checkpointed as they would be for another choice.

    No formula stands for the step: a storage is alive at a moment if one of its references is, and each reference has
    the beginning and the end that were measured. Saved bytes grow until something is released, so only the moments
    before a release that follows a beginning need be looked at: the end of forward, and of each recomputation.

    Args:
        holdings: The references of the step, of all three kinds.
        blocks: Names of the blocks; others' holdings must not be among them.

    Attributes:
        shares: All bytes that were saved.
        moments: Number of moments looked at.
    """

    def __init__(self, holdings: Iterable[Holding], blocks: Sequence[str]) -> None:
        self.blocks = tuple(blocks)
        holdings = list(holdings)
        self.shares = _shares(holdings, {name: index for index, name in enumerate(blocks)})
        self.moments = len(self.shares[0].always) if self.shares else 0

    def peak_bytes(self, checkpointed: Collection[str]) -> int:
        """The most bytes saved at one time if just these blocks are checkpointed."""
        plan = np.array([[name in checkpointed for name in self.blocks]], dtype=bool)
        return int(self.peaks(plan)[0])

    def peaks(self, plans: Bools) -> NDArray[np.int64]:
        """The same for ``plans`` of shape (plans, blocks), true where a block is checkpointed; of shape (plans,)."""
        return np.concatenate(
            [self._peaks(plans[first : first + _PLANS_AT_ONCE]) for first in range(0, len(plans), _PLANS_AT_ONCE)]
        )

    def _peaks(self, plans: Bools) -> NDArray[np.int64]:
        live = np.zeros((len(plans), self.moments), dtype=np.int64)
        for share in self.shares:
            live += share.nbytes * share.alive(plans)
        peaks: NDArray[np.int64] = live.max(axis=1, initial=0)
        return peaks


def _shares(holdings: list[Holding], indices: dict[str, int]) -> list[Share]:
    lives = _lives(holdings)
    by_storage: defaultdict[int, list[tuple[Holding, Bools]]] = defaultdict(list)
    for holding, life in zip(holdings, lives, strict=True):
        by_storage[holding.storage].append((holding, life))
    bytes_of: defaultdict[tuple[object, ...], int] = defaultdict(int)
    parts_of: dict[tuple[object, ...], Share] = {}
    for references in by_storage.values():
        share = _simplified(references, indices)
        key = (share.always.tobytes(), _key(share.plain), _key(share.checkpointed))
        bytes_of[key] += share.nbytes
        parts_of[key] = share
    return [Share(bytes_of[key], share.always, share.plain, share.checkpointed) for key, share in parts_of.items()]


def _lives(holdings: list[Holding]) -> Bools:
    """At which moments each holding is alive, of shape (holdings, moments)."""
    events = [(holding.start, True) for holding in holdings]
    events = sorted(events + [(holding.end, False) for holding in holdings if holding.end is not None])
    last = events[-1][0] + 1 if events else 0
    steps = itertools.pairwise([*events, (last, False)])
    moments = [after for (_, begins), (after, goes_on) in steps if begins and not goes_on]
    starts = np.array([holding.start for holding in holdings], dtype=np.int64)
    ends = np.array([last if holding.end is None else holding.end for holding in holdings], dtype=np.int64)
    at = np.array(moments, dtype=np.int64)
    return (starts[:, None] < at) & (at <= ends[:, None])


def _simplified(references: list[tuple[Holding, Bools]], indices: dict[str, int]) -> Share:
    """References that do not depend on the choice, as far as that can be seen one block at a time, become one."""
    always = np.zeros_like(references[0][1])
    plain: dict[int, Bools] = {}
    checkpointed: dict[int, Bools] = {}
    for holding, life in references:
        if holding.when == "always":
            always |= life
        else:
            assert holding.block is not None
            side = plain if holding.when == "plain" else checkpointed
            index = indices[holding.block]
            side[index] = side.get(index, np.zeros_like(life)) | life
    for index in plain.keys() & checkpointed.keys():
        always |= plain[index] & checkpointed[index]
    return Share(
        max(holding.nbytes for holding, _ in references), always, _beyond(plain, always), _beyond(checkpointed, always)
    )


def _beyond(lives: dict[int, Bools], always: Bools) -> dict[int, Bools]:
    return {index: life & ~always for index, life in lives.items() if (life & ~always).any()}


def _key(lives: dict[int, Bools]) -> tuple[tuple[int, bytes], ...]:
    return tuple(sorted((index, life.tobytes()) for index, life in lives.items()))
