"""Which pairs of ranks to measure, in which order, and which at once.

1. All pairs within each host, and between the first ranks of each two hosts; of more than 16, n·log n pairs. What
   counts as a host is a guess that saves measurements, and no more:
2. The links that decide the grouping are measured again until two figures agree, since noise makes links look slow and
   never fast: the best one between any two domains, and those that hold domains of several hosts together.
3. Between any two domains that the figures set apart, at least one pair is measured; all pairs of a domain that joins
   several guessed hosts. That is repeated until nothing is open, so wrong guesses end here.
4. Where the figures confirm the guess, the second figure can wait until here, and may be left out if time is short.
5. A few long messages for the figures of each level.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import TypeAlias

from lightning_hpc.comm.grouping import Pair, Partition, cheapest_merges, group_ranks, height_of, partitions
from lightning_hpc.comm.link_speed import LinkSpeed
from lightning_hpc.comm.pair_test import TestPlan
from lightning_hpc.comm.schedule import ordered, sample, tournament, waves
from lightning_hpc.comm.topology import Topology

Measure: TypeAlias = Callable[[Sequence[Pair], Sequence[TestPlan]], Sequence[tuple[LinkSpeed, LinkSpeed]]]
"""Tests pairs that share no rank, all at once; returns each one's speeds from the first to the second and back."""

_FIRST_BYTES = 16 * 2**10
_REPEAT_MS = 6
_PAIRS_OF_A_LEVEL = 3
_MOST_REPEATS = 3
# Two measurements of a pair agree within this factor, unless one of them was disturbed.
_AGREEMENT = 1.3
# Messages of some 100 ms, two of them unless the first took longer than 140 ms.
_LONG_S = 100e-3
_LONG_REPEAT_MS = 140
_LONG_MIN_BYTES = 64 * 2**10
# A link that carries a slice in less has been measured with messages of full size already.
_FAST_S = 4e-3


class Survey:
    """The figures of all pairs measured so far, and what they say.

    Args:
        hosts: For each rank a number that ranks of one host have in common, as far as can be told.
        machines: The same for machines, which may emulate several hosts.
        measure: Does the measuring.
        slice_bytes: The message whose time is the cost of a link.
        seconds: Time after which nothing is measured that the grouping can do without.

    Attributes:
        speeds: Speed from one rank to another.
    """

    def __init__(
        self, hosts: Sequence[int], machines: Sequence[int], measure: Measure, slice_bytes: int, seconds: float
    ) -> None:
        self._hosts = hosts
        self._machines = machines
        self._measure = measure
        self._slice_bytes = slice_bytes
        self._short = TestPlan(min(_FIRST_BYTES, slice_bytes), slice_bytes, _REPEAT_MS)
        self._deadline = time.monotonic() + seconds
        self._confirmed: set[Pair] = set()
        self.speeds: dict[Pair, LinkSpeed] = {}

    def run(self) -> Topology:
        """Measures until the topology is certain, and returns it with the speed of its levels."""
        pairs = list(self._first_pairs())
        while pairs:
            self._test(pairs)
            self._ask_again(doubtful=True)
            pairs = self._open_questions()
        self._ask_again(doubtful=False)
        topology = group_ranks(self.costs(), self._hosts)
        return Topology(topology.domains, tuple(self._measure_level(topology, h) for h in range(topology.depth)))

    def costs(self) -> dict[Pair, float]:
        """Seconds of one slice for each measured pair, in the better direction: noise rarely hits both."""
        return self._costs(min)

    def worst_costs(self) -> dict[Pair, float]:
        """The same in the worse direction of links between hosts, where noise is small and a fault may be one-sided."""
        costs, worst = self.costs(), self._costs(max)
        return {(a, b): (costs if self._hosts[a] == self._hosts[b] else worst)[a, b] for a, b in costs}

    def _costs(self, choose: Callable[[float, float], float]) -> dict[Pair, float]:
        return {
            (a, b): choose(speed.seconds(self._slice_bytes), self.speeds[b, a].seconds(self._slice_bytes))
            for (a, b), speed in self.speeds.items()
            if a < b
        }

    def _first_pairs(self) -> Iterator[Pair]:
        members: dict[int, list[int]] = {}
        for rank, host in enumerate(self._hosts):
            members.setdefault(host, []).append(rank)
        for ranks in members.values():
            yield from sample(ranks)
        yield from sample([ranks[0] for ranks in members.values()])

    def _open_questions(self) -> list[Pair]:
        """Pairs that could still show that domains are one, or that one of several guessed hosts is more than one."""
        costs = self.costs()
        blocks = self._innermost()
        place = _places(blocks)
        joined = {frozenset((place[a], place[b])) for a, b in costs}
        between = [
            ordered((blocks[i][0], blocks[j][0]))
            for i, j in tournament(range(len(blocks)))
            if frozenset((i, j)) not in joined
        ]
        mixed = [block for block in blocks if len({self._hosts[rank] for rank in block}) > 1]
        return [*between, *(pair for block in mixed for pair in sample(block) if pair not in costs)]

    def _ask_again(self, *, doubtful: bool) -> None:
        """Measures the links that decide the grouping again, each until two measurements agree.

        Args:
            doubtful: Whether to ask for those only that the guess at hosts does not confirm. The others can do without.
        """
        for _ in range(_MOST_REPEATS):
            sure = self._confirmed_hosts()
            pairs = [pair for pair in self._deciding_pairs() if pair not in self._confirmed]
            if doubtful:
                pairs = [(a, b) for a, b in pairs if not (a in sure and b in sure)]
            self._test(pairs, optional=not doubtful)

    def _confirmed_hosts(self) -> set[int]:
        """The ranks of innermost domains that are just one guessed host of several ranks."""
        sizes = Counter(self._hosts)
        found: set[int] = set()
        for block in self._innermost():
            if len(block) > 1 and {self._hosts[rank] for rank in block} == {self._hosts[block[0]]}:
                found |= set(block) if sizes[self._hosts[block[0]]] == len(block) else set()
        return found

    def _deciding_pairs(self) -> list[Pair]:
        """The best link between any two innermost domains, and those that hold domains of several hosts together."""
        costs = self.costs()
        place = _places(self._innermost())
        mixed = {place[a] for a, b in costs if place[a] == place[b] and self._hosts[a] != self._hosts[b]}
        merges = [(a, b) for _, (a, b) in cheapest_merges(costs, len(self._hosts)) if place[a] == place[b]]
        return [*((a, b) for a, b in merges if place[a] in mixed), *self._best_between_domains()]

    def _best_between_domains(self) -> list[Pair]:
        """The cheapest measured link between each two innermost domains."""
        place = _places(self._innermost())
        best: dict[frozenset[int], Pair] = {}
        costs = self.costs()
        for pair in sorted(costs, key=lambda pair: costs[pair]):
            if place[pair[0]] != place[pair[1]]:
                best.setdefault(frozenset(place[rank] for rank in pair), pair)
        return list(best.values())

    def _innermost(self) -> Partition:
        levels = partitions(self.costs(), len(self._hosts))
        return levels[1] if len(levels) > 2 else levels[-1]

    def _measure_level(self, topology: Topology, height: int) -> LinkSpeed:
        """The speed of a level: the median over its pairs.

        Where that takes long messages to tell, some typical pairs get those, and of each the slower direction counts.
        Of a fast level it is the better one, as noise is larger there than any difference.
        """
        costs = self._costs_of_level(topology, height)
        usual = median(costs.values())
        slow = usual > _FAST_S
        chosen = list(costs)
        if slow:
            chosen = self._apart(sorted(costs, key=lambda pair: abs(math.log(costs[pair] / usual))), topology)
            self._test_long(chosen)
        both = [(self.speeds[pair], self.speeds[pair[::-1]]) for pair in chosen]
        choose = min if slow else max
        return LinkSpeed(
            median(min(there.latency_seconds, back.latency_seconds) for there, back in both),
            median(choose(there.bytes_per_second, back.bytes_per_second) for there, back in both),
        )

    def _apart(self, pairs: Sequence[Pair], topology: Topology) -> list[Pair]:
        """The first few pairs that have neither a host nor a node in common, and so no link either."""
        node_of = _places(topology.nodes) if topology.depth > 1 else {}
        chosen: list[Pair] = []
        taken: set[tuple[str, int]] = set()
        for pair in pairs:
            places = {("host", self._hosts[rank]) for rank in pair}
            places |= {("node", node_of[rank]) for rank in pair if rank in node_of}
            if taken.isdisjoint(places) and len(chosen) < _PAIRS_OF_A_LEVEL:
                chosen.append(pair)
                taken |= places
        return chosen

    def _test_long(self, pairs: Sequence[Pair]) -> None:
        """Puts the figures of long messages in place of short ones.

        Those follow from a figure that noise may have made too low. So a message that turns out short, which a shaped
        link may let pass at once, is followed by one of the size that its own figure asks for; and a figure far below
        that of the short message gets another try.
        """
        short = {way: self.speeds[way].bytes_per_second for pair in pairs for way in (pair, pair[::-1])}
        left = list(pairs)
        for _ in range(_MOST_REPEATS):
            unsettled = []
            for wave in waves(left, self._hosts, self._machines):
                sizes = [self._long_bytes(pair) for pair in wave]
                plans = [TestPlan(size, size, _LONG_REPEAT_MS) for size in sizes]
                for pair, size, speeds in zip(wave, sizes, self._measure(wave, plans), strict=True):
                    self.speeds[pair], self.speeds[pair[::-1]] = speeds
                    lower = any(short[w] > _AGREEMENT * self.speeds[w].bytes_per_second for w in (pair, pair[::-1]))
                    if lower or 2 * size < self._long_bytes(pair):
                        unsettled.append(pair)
            left = unsettled

    def _long_bytes(self, pair: Pair) -> int:
        """Bytes that take `_LONG_S` by the figures so far, within bounds."""
        rate = min(self.speeds[pair].bytes_per_second, self.speeds[pair[::-1]].bytes_per_second)
        return min(max(int(rate * _LONG_S), _LONG_MIN_BYTES), 2 * self._slice_bytes)

    def _costs_of_level(self, topology: Topology, height: int) -> dict[Pair, float]:
        return {pair: cost for pair, cost in self.costs().items() if height_of(topology, pair) == height}

    def _test(self, pairs: Iterable[Pair], *, optional: bool = False) -> None:
        for wave in waves(pairs, self._hosts, self._machines):
            if optional and time.monotonic() > self._deadline:
                return
            for pair, speeds in zip(wave, self._measure(wave, [self._short] * len(wave)), strict=True):
                self._note(pair, speeds)

    def _note(self, pair: Pair, speeds: Sequence[LinkSpeed]) -> None:
        """Keeps the better of new figures and those so far, and whether the two agree."""
        ways = (pair, pair[::-1])
        if pair in self.speeds:
            before = min(self.speeds[way].seconds(self._slice_bytes) for way in ways)
            after = min(speed.seconds(self._slice_bytes) for speed in speeds)
            if max(before, after) < _AGREEMENT * min(before, after):
                self._confirmed.add(pair)
        for way, new in zip(ways, speeds, strict=True):
            self.speeds[way] = _better(self.speeds.get(way, new), new)


def _better(old: LinkSpeed, new: LinkSpeed) -> LinkSpeed:
    return LinkSpeed(min(old.latency_seconds, new.latency_seconds), max(old.bytes_per_second, new.bytes_per_second))


def _places(blocks: Partition) -> dict[int, int]:
    """The number of each rank's block."""
    return {rank: index for index, block in enumerate(blocks) for rank in block}
