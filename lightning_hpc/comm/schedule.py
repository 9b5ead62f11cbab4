"""In which order pairs of ranks are tested, and which of them at once."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from lightning_hpc.comm.grouping import Pair

_MOST_TO_PAIR_ALL = 16
_AT_ONCE_ON_A_MACHINE = 2


def waves(pairs: Iterable[Pair], hosts: Sequence[int], machines: Sequence[int]) -> Iterator[list[Pair]]:
    """Splits pairs into sets that may run at once: each pair goes into the first set that has room for it.

    Every host takes part in one test at a time, since its ranks share its link: two transfers at once would get half of
    it each. A machine that is several hosts (containers, emulated nodes) takes part in two, since they share its
    processors.

    Args:
        pairs: What to test.
        hosts: For each rank a number that ranks of one host have in common.
        machines: The same for machines.
    """
    left = list(pairs)
    while left:
        wave: list[Pair] = []
        busy: set[int] = set()
        load: Counter[int] = Counter()
        for pair in left:
            its_hosts = {hosts[rank] for rank in pair}
            if not busy.isdisjoint(its_hosts):
                continue
            # Within a host the processors are what is shared: one test has them for itself.
            weight = _AT_ONCE_ON_A_MACHINE if len(its_hosts) == 1 else 1
            its_machines = {machines[rank] for rank in pair}
            if all(load[machine] + weight <= _AT_ONCE_ON_A_MACHINE for machine in its_machines):
                wave.append(pair)
                busy |= its_hosts
                load.update(dict.fromkeys(its_machines, weight))
        yield wave
        taken = set(wave)
        left = [pair for pair in left if pair not in taken]


def tournament(players: Sequence[int]) -> Iterator[Pair]:
    """All pairs, in rounds in which nobody plays twice (the circle method)."""
    circle: list[int | None] = list(players)
    if len(circle) % 2:
        circle.append(None)
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        for first, second in zip(circle[:half], reversed(circle[half:]), strict=True):
            if first is not None and second is not None:
                yield ordered((first, second))
        circle = [circle[0], circle[-1], *circle[1:-1]]


def sample(players: Sequence[int]) -> Iterator[Pair]:
    """All pairs of few players; of many those at distances 1, 2, 4, …, which connect them all."""
    if len(players) <= _MOST_TO_PAIR_ALL:
        yield from tournament(players)
        return
    distance = 1
    while distance <= len(players) // 2:
        yield from {ordered((a, players[(i + distance) % len(players)])): None for i, a in enumerate(players)}
        distance *= 2


def ordered(pair: Pair) -> Pair:
    """The pair with the lower rank first."""
    return pair if pair[0] < pair[1] else pair[::-1]
