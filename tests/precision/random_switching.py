"""Ranks that switch by random readings, without a model: what the soak and the tests run."""

import math
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_hpc.memory import CallableProbe, MemoryReading
from lightning_hpc.precision.switch import Switch
from lightning_hpc.precision.switch_controller import SwitchController
from lightning_hpc.precision.switch_policy import SwitchPolicy

LIMIT = 10_000
PATIENCE = 5


class FakeMap:
    """Knows which units are low, and measures what they would save."""

    def __init__(self, plain: dict[str, int], low: dict[str, int]) -> None:
        self.plain, self.saving_low = plain, low
        self.names = list(plain)
        self.low: list[str] = []
        self.is_frozen = False

    def set_low(self, names: list[str]) -> None:
        assert not self.is_frozen, "the map changed between a forward and its backward"
        self.low = list(names)

    def measure(self, controller: SwitchController, scale: float) -> None:
        """What `SwitchController.measured_forward` does with a meter."""
        controller.wants_measurement = False
        for name in self.names:
            saved = self.saving_low[name] if name in self.low else self.plain[name]
            meter: Any = _Meter(name, int(scale * saved), int(scale * self.plain[name]), int(1000 * scale))
            if saved and (found := controller._compare(name, meter)) is not None:
                controller._measured[name] = found


class _Meter:
    def __init__(self, name: str, saved: int, float32: int, inputs: int) -> None:
        self.saved, self.saved_float32, self.inputs = {name: saved}, {name: float32}, {name: inputs}


class Exchange:
    """Joins ranks that take turns."""

    failure = None

    def __init__(self, ranks: list["Exchange"]) -> None:
        self.ranks = ranks
        self.sent: deque[NDArray[np.float64]] = deque()
        ranks.append(self)

    def start(self, values: NDArray[np.float64]) -> None:
        self.sent.append(values)

    def take(self, wait_s: float = 0.0) -> NDArray[np.float64] | None:
        # Each rank takes its turn at the same step; what the first has taken, the others still have to.
        if not all(rank.sent for rank in self.ranks):
            raise AssertionError("a rank takes what another has not sent")
        return np.array([rank.sent[0] for rank in self.ranks])

    def finish_step(self) -> None:
        while len(self.sent) > 1:
            self.sent.popleft()


class Rank:
    """One rank: its readings, its map, its decisions."""

    def __init__(self, exchanges: list[Exchange], plain: dict[str, int], low: dict[str, int], interval: int) -> None:
        self.used = 0
        self.map = FakeMap(plain, low)
        self.policy = SwitchPolicy(self.map.names, 0.9, 0.7, PATIENCE)
        self.exchange = Exchange(exchanges)
        probe = CallableProbe(lambda: MemoryReading(self.used, LIMIT))
        fake: Any = self.map
        self.controller = SwitchController(fake, self.policy, probe, self.exchange, interval)


def bound(units: int, checks: int) -> int:
    """The most switches, as the policy's docstring says."""
    returns = units * (1 + math.log2(1 + checks / PATIENCE))
    return int(2 * returns + 2 * units)


def run_sequence(seed: int, steps: int = 200) -> list[Switch]:
    """One random run of random ranks; asserts what must hold at each step.

    Raises:
        AssertionError: If it does not.
    """
    random = np.random.default_rng(seed)
    count, names = int(random.integers(1, 5)), [f"unit{index}" for index in range(int(random.integers(0, 9)))]
    interval = int(random.integers(1, 6))
    exchanges: list[Exchange] = []
    ranks = []
    for _ in range(count):
        plain = {name: int(random.integers(0, 2000)) for name in names}
        low = {name: int(each * random.choice([0.5, 0.6, 0.8, 1.0, 1.2])) for name, each in plain.items()}
        ranks.append(Rank(exchanges, plain, low, interval))
    base = random.uniform(0, LIMIT, size=count)
    switches: list[Switch] = []
    for step in range(steps):
        if random.random() < 0.1:
            base = random.uniform(0, 1.1 * LIMIT, size=count)
        found = []
        for rank, used in zip(ranks, base, strict=True):
            saved = sum(rank.map.plain[name] - rank.map.saving_low[name] for name in rank.map.low)
            rank.used = max(int(used * random.uniform(0.95, 1.05)) - saved, 0)
            found.append(rank.controller.begin_step())
        assert all(each == found[0] for each in found), f"seed {seed}, step {step}: {found}"
        switches += found[0]
        maps = [rank.map.low for rank in ranks]
        assert all(each == maps[0] == ranks[0].policy.lowered for each in maps), f"seed {seed}, step {step}: {maps}"
        for rank in ranks:
            rank.map.is_frozen = True  # forward and backward
            if rank.controller.wants_measurement:
                rank.map.measure(rank.controller, random.choice([0.5, 1.0, 2.0]))
            rank.map.is_frozen = False
            rank.exchange.finish_step()
    assert len(switches) <= bound(len(names), steps), f"seed {seed}: {len(switches)} switches"
    return switches
