"""`SwitchController`: reads, measures, agrees and switches, once at the beginning of each optimizer step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_hpc.memory.probe import PressureProbe
from lightning_hpc.memory.reading import MemoryReading
from lightning_hpc.precision.precision_map import PrecisionMap
from lightning_hpc.precision.switch import Switch
from lightning_hpc.precision.switch_policy import SwitchPolicy
from lightning_hpc.precision.unit_bytes import UnitBytes
from lightning_hpc.precision.unit_meter import UnitMeter


class Exchange(Protocol):
    """An all-gather that goes on beside the training, such as `lightning_hpc.comm.BackgroundGather`."""

    failure: str | None

    def start(self, values: NDArray[np.float64]) -> None:
        """Starts to collect the ranks' ``values``."""
        ...

    def take(self, wait_s: float = 0.0) -> NDArray[np.float64] | None:
        """What was collected, of shape (ranks, …)."""
        ...


class SwitchController:
    """Changes the map of precisions where all ranks are between a backward and the next forward.

    A check takes two steps: at the beginning of the first, each rank sends its reading; at the beginning of the next,
    which no rank can reach before all have begun the first, it takes those of all, and all decide the same. There is
    one every `interval` steps, and one right after each switch, whose step is measured.

    Args:
        precision_map: What is switched. The controller alone changes it.
        policy: What decides.
        probe: This rank's memory.
        exchange: How the ranks agree.
        interval: Steps between checks.

    Attributes:
        wants_measurement: Whether the coming forward is to be measured.
    """

    def __init__(
        self,
        precision_map: PrecisionMap,
        policy: SwitchPolicy,
        probe: PressureProbe,
        exchange: Exchange,
        interval: int,
    ) -> None:
        self._map = precision_map
        self._policy = policy
        self._probe = probe
        self._exchange = exchange
        self._interval = interval
        self._until_check = 2  # once the first step has been measured
        self._is_pending = False
        self._gathered: NDArray[np.float64] | None = None  # has come, and waits for the next step
        self.wants_measurement = not policy.bytes
        self._measured: dict[str, UnitBytes] = {}
        precision_map.set_low(policy.lowered)

    def begin_step(self) -> list[Switch]:
        """Takes what was agreed, applies it, and sends a reading if it is time to.

        Returns:
            What was switched, on all ranks the same.
        """
        self._receive()
        switches = self._take()
        if switches:
            self.apply()
            return switches
        self._until_check -= 1
        if self._until_check <= 0:
            self._until_check = self._interval
            self._send()
        return []

    def apply(self) -> None:
        """Has the map follow the policy; the coming step is measured, and checked right after."""
        self._map.set_low(self._policy.lowered)
        self.wants_measurement = True
        self._until_check = 1
        self._is_pending = False  # what was sent before says nothing of what comes
        self._gathered = None
        self._probe.read()  # nor does a peak

    @contextmanager
    def measured_forward(self) -> Iterator[None]:
        """Round a training step's forward, where `wants_measurement`."""
        with self._map.measured() as meter:
            yield
        self.wants_measurement = False
        for name in self._map.names:
            if meter.saved[name] and (found := self._compare(name, meter)) is not None:
                self._measured[name] = found

    def state_dict(self, wait_s: float = float("inf")) -> dict[str, Any]:
        """What is between two steps, in plain types.

        Args:
            wait_s: Most seconds to wait for readings of other ranks that are on their way.
        """
        self._receive(wait_s)
        return {
            "until_check": self._until_check,
            "wants_measurement": self.wants_measurement,
            "measured": {name: astuple(each) for name, each in self._measured.items()},
            "gathered": None if self._gathered is None else self._gathered.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self._until_check = state["until_check"]
        self.wants_measurement = state["wants_measurement"]
        self._measured = {name: UnitBytes(*values) for name, values in state["measured"].items()}
        gathered = state["gathered"]
        if gathered is not None and len(gathered[0]) == 2 + 4 * len(self._map.names):  # not of a model with other units
            self._gathered = np.array(gathered)

    def _compare(self, name: str, meter: UnitMeter) -> UnitBytes | None:
        saved, inputs = meter.saved[name], meter.inputs[name]
        before = self._policy.bytes.get(name)
        if name not in self._policy.lowered:
            if before is not None and before.is_measured:
                return before
            return UnitBytes(saved, saved - meter.saved_float32[name] // 2, inputs)
        if before is None:  # low before anything was measured, so there is nothing to compare with
            return UnitBytes(2 * saved, saved, inputs)
        plain = before.plain * inputs // before.inputs if before.inputs else before.plain
        found = UnitBytes(plain, saved, inputs, is_measured=True)
        # What attention saves grows with the square of the length, say: only equal batches can tell that it is useless.
        return None if found.is_useless and inputs != before.inputs else found

    def _send(self) -> None:
        reading = self._probe.read()
        values = np.full(2 + 4 * len(self._map.names), -1.0)
        values[:2] = reading.used_bytes, reading.limit_bytes
        if self._measured:  # most checks have nothing but the reading
            units = values[2:].reshape(-1, 4)
            for index, name in enumerate(self._map.names):
                if name in self._measured:
                    units[index] = astuple(self._measured[name])
            self._measured = {}
        known_low = (self._policy.bytes.get(name) for name in self._policy.lowered)
        self.wants_measurement |= any(each is not None and not each.is_measured for each in known_low)
        self._exchange.start(values)
        self._is_pending = True

    def _receive(self, wait_s: float = float("inf")) -> None:
        if self._is_pending:
            self._gathered = self._exchange.take(wait_s)
            self._is_pending = False

    def _take(self) -> list[Switch]:
        gathered, self._gathered = self._gathered, None
        if gathered is None:  # none was sent; or a peer is gone: the training ends soon, or goes on as it is
            return []
        found = {}
        if (gathered[:, 2::4] >= 0).any():  # of the bytes that a unit saves; less than 0 is not known
            # The rank that saves most speaks for all.
            figures = gathered[:, 2:].max(axis=0).reshape(-1, 4).astype(int)
            for index in np.flatnonzero(figures[:, 0] >= 0):
                plain, low, inputs, is_measured = figures[index].tolist()
                found[self._map.names[index]] = UnitBytes(plain, low, inputs, bool(is_measured))
        undone = self._policy.learn(found)
        decided = self._policy.decide([MemoryReading(int(used), int(limit)) for used, limit in gathered[:, :2]])
        return [switch for switch in (undone, decided) if switch is not None]
