"""Made-up holdings: steps of a model of which only the bytes matter, and a slow replay of them to compare with."""

import itertools
import random
from collections.abc import Collection, Iterator

from lightning_hpc.memory.saved_activations import Holding


class Step:
    """The holdings of a step with all blocks checkpointed, where blocks run one after the other.

    Each block saves tensors of its own and, mostly, its input; some save the output that is the next one's input.

    Args:
        seed: Of everything.
        blocks: Number of blocks.
        equal: Whether all blocks are alike.
        tangled: Whether there are storages that several blocks far from each other save.
    """

    def __init__(self, seed: int, blocks: int, *, equal: bool = False, tangled: bool = False) -> None:
        self._random = random.Random(seed)
        self._clock = itertools.count()
        self._numbers = itertools.count()
        self.names = [f"block{index}" for index in range(blocks)]
        self.holdings: list[Holding] = []
        sizes = [self._size() for _ in range(3)]
        own = [sizes if equal else [self._size() for _ in range(self._random.randint(1, 4))] for _ in range(blocks)]
        self.seconds = [0.01 if equal else self._random.uniform(0.001, 0.02) for _ in range(blocks)]
        shared = [(next(self._numbers), self._size()) for _ in range(3)] if tangled else []
        self._run(own, shared, sizes[0])

    def _run(self, own: list[list[int]], shared: list[tuple[int, int]], width: int) -> None:
        outside = [self._hold(next(self._numbers), self._size()) for _ in range(2)]
        hidden = next(self._numbers)
        calls = []
        for name, sizes in zip(self.names, own, strict=True):
            inputs = [self._hold(hidden, width, name, "checkpointed")]
            saves = [(hidden, width)] if self._random.random() < 0.8 else []
            saves += [(next(self._numbers), size) for size in sizes]
            saves += [part for part in shared if self._random.random() < 0.5]
            hidden = next(self._numbers)
            saves += [(hidden, width)] if self._random.random() < 0.4 else []
            plain = [self._hold(*save, name, "plain") for save in saves]
            calls.append((name, inputs, saves, plain))
        outside += [self._hold(hidden, width), self._hold(next(self._numbers), self._size())]
        self._end(outside[2:])
        for name, inputs, saves, plain in reversed(calls):
            held = {holding.storage for holding in inputs}
            again = [
                self._hold(number if number in held else next(self._numbers), size, name, "checkpointed")
                for number, size in saves
            ]
            for holding, twin in reversed(list(zip(again, plain, strict=True))):
                self._end([holding, twin])
            self._end(inputs)
        self._end(outside[:2])

    def _size(self) -> int:
        return self._random.randint(1, 1000)

    def _hold(self, number: int, size: int, block: str | None = None, when: str = "always") -> Holding:
        self.holdings.append(Holding(number, size, next(self._clock), None, block, when))  # type: ignore[arg-type]
        return self.holdings[-1]

    def _end(self, holdings: list[Holding]) -> None:
        for holding in holdings:
            holding.end = next(self._clock)

    def replay(self, checkpointed: Collection[str]) -> int:
        """The peak, by looking at every moment."""
        there = [holding for holding in self.holdings if _is_there(holding, checkpointed)]
        ends = {holding: holding.end if holding.end is not None else next(self._clock) for holding in there}
        return max(
            sum({other.storage: other.nbytes for other in there if other.start <= moment < ends[other]}.values())
            for moment in (holding.start for holding in there)
        )

    def plans(self) -> Iterator[tuple[str, ...]]:
        for count in range(len(self.names) + 1):
            yield from itertools.combinations(self.names, count)

    def cost(self, checkpointed: Collection[str]) -> float:
        return sum(second for name, second in zip(self.names, self.seconds, strict=True) if name in checkpointed)


def _is_there(holding: Holding, checkpointed: Collection[str]) -> bool:
    return holding.when == "always" or (holding.block in checkpointed) == (holding.when == "checkpointed")
