"""`SwitchPolicy`: which units go to low precision, and when they come back."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_hpc.memory.reading import MemoryReading
from lightning_hpc.precision.switch import Switch
from lightning_hpc.precision.unit_bytes import UnitBytes


class SwitchPolicy:
    """Decides from readings that all ranks have agreed on, and from nothing else, so all ranks decide the same.

    Above the high watermark, units go to low precision, those that save most first, until the fullest rank would be
    half way between the watermarks. Below the low one for `patience` checks in a row, the last of them comes back,
    if that leaves the rank below the middle. Whenever pressure returns after one came back, `patience` doubles.
    In T checks, units therefore come back at most n (1 + log2(1 + T / patience)) times, n being their number, and
    there are at most twice as many switches plus 2 n.

    Args:
        names: The units, in the order of the model.
        high: Watermark, part of the limit.
        low: Watermark, part of the limit.
        patience: Checks below `low` before a unit comes back.

    Attributes:
        lowered: Units in low precision, in the order in which they went there.
        useless: Units that low precision saves nothing for.
        is_exhausted: Whether pressure was above the high watermark at the last check with nothing left to lower.
    """

    def __init__(self, names: Sequence[str], high: float, low: float, patience: int) -> None:
        self.lowered: list[str] = []
        self.useless: list[str] = []
        self.is_exhausted = False
        self.bytes: dict[str, UnitBytes] = {}
        self._names = list(names)
        self._high = high
        self._low = low
        self._patience = patience
        self._calm_checks = 0
        self._calm_used = 0
        self._came_back = False

    def learn(self, measured: Mapping[str, UnitBytes]) -> Switch | None:
        """Takes what has been measured, and undoes what saved nothing."""
        self.bytes.update(measured)
        useless = [name for name in self.lowered if self._is_useless(name)]
        if not useless:
            return None
        self.useless += useless
        return self._bring_back(useless, "useless", None)

    def decide(self, readings: Sequence[MemoryReading]) -> Switch | None:
        """Takes one reading of each rank."""
        worst = max(readings, key=lambda reading: reading.pressure)
        self.is_exhausted = False
        if worst.pressure > self._low:
            self._calm_checks = 0
        if worst.pressure >= self._high:
            chosen = self._choose(worst.used_bytes - self._middle(worst))
            self.is_exhausted = not chosen
            return self._lower(chosen, "pressure", worst) if chosen else None
        if worst.pressure <= self._low:
            self._calm_used = max(worst.used_bytes, self._calm_used if self._calm_checks else 0)
            self._calm_checks += 1
            if self._calm_checks >= self._patience and self.lowered:
                return self._return_last(worst)
        return None

    def lower_one_level(self) -> Switch | None:
        """What an allocation that failed asks for: a quarter of what low precision can still save, or all of it."""
        candidates = self._candidates()
        if self.bytes:
            chosen = self._choose(sum(self._saving(name) for name in candidates) // 4)
        else:
            chosen = candidates[: -(-len(candidates) // 4)]  # nobody knows yet which of them save most
        return self._lower(chosen, "out of memory", None) if chosen else None

    def state_dict(self) -> dict[str, Any]:
        """All that later decisions depend on, in plain types."""
        return {
            "lowered": list(self.lowered),
            "useless": list(self.useless),
            "bytes": {name: [each.plain, each.low, each.inputs, each.is_measured] for name, each in self.bytes.items()},
            "patience": self._patience,
            "calm": [self._calm_checks, self._calm_used],
            "came_back": self._came_back,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores it.

        Raises:
            ValueError: If it is of other units.
        """
        unknown = {*state["lowered"], *state["useless"], *state["bytes"]} - set(self._names)
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))} are no units of this model")
        self.lowered = list(state["lowered"])
        self.useless = list(state["useless"])
        self.bytes = {name: UnitBytes(*values) for name, values in state["bytes"].items()}
        self._patience = state["patience"]
        self._calm_checks, self._calm_used = state["calm"]
        self._came_back = state["came_back"]

    def _middle(self, reading: MemoryReading) -> int:
        return int((self._high + self._low) / 2 * reading.limit_bytes)

    def _candidates(self) -> list[str]:
        """Units that may go to low precision, those that save most first; in the order of the model if equal."""
        able = [name for name in self._names if name not in self.lowered and name not in self.useless]
        # What has never run saves nothing. Before anything has been measured, all may.
        able = [name for name in able if not self.bytes or self._saving(name) > 0]
        return sorted(able, key=self._saving, reverse=True)

    def _choose(self, needed: int) -> list[str]:
        chosen: list[str] = []
        for name in self._candidates():
            if chosen and sum(self._saving(each) for each in chosen) >= needed:
                break
            chosen.append(name)
        return chosen

    def _saving(self, name: str) -> int:
        return self.bytes[name].saving if name in self.bytes else 0

    def _is_useless(self, name: str) -> bool:
        unit = self.bytes.get(name)
        return unit is not None and unit.is_measured and unit.is_useless

    def _return_last(self, worst: MemoryReading) -> Switch | None:
        name = self.lowered[-1]
        if self._calm_used + self._saving(name) > self._middle(worst):
            return None
        self._came_back = True
        return self._bring_back([name], "calm", worst)

    def _lower(self, names: list[str], reason: Any, worst: MemoryReading | None) -> Switch:
        self.lowered += names
        self._calm_checks = 0
        if self._came_back:
            self._patience *= 2
            self._came_back = False
        return self._switch(names, reason, worst, to_low=True)

    def _bring_back(self, names: list[str], reason: Any, worst: MemoryReading | None) -> Switch:
        self.lowered = [name for name in self.lowered if name not in names]
        self._calm_checks = 0
        return self._switch(names, reason, worst, to_low=False)

    def _switch(self, names: list[str], reason: Any, worst: MemoryReading | None, *, to_low: bool) -> Switch:
        return Switch(
            reason=reason,
            units=tuple(names),
            to_low=to_low,
            pressure=None if worst is None else worst.pressure,
            limit_bytes=None if worst is None else worst.limit_bytes,
            bytes=sum(self._saving(name) for name in names),
            low_count=len(self.lowered),
        )
