"""The module `pynvml`, without a driver."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest


class FakeNvml:
    """One GPU, or none where the name is empty; a utilization of None stands for a GPU without that figure."""

    class NVMLError(Exception):
        pass

    def __init__(self, name: str, utilization: int | None = 40, has_driver: bool = True) -> None:
        self.name, self.utilization, self.has_driver = name, utilization, has_driver
        self.users = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "FakeNvml":
        monkeypatch.setitem(sys.modules, "pynvml", self)
        return self

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.has_driver:
            raise self.NVMLError("Driver Not Loaded")
        self.users += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.users -= 1

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:  # noqa: N802
        if name != self.name:
            raise self.NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        assert self.users
        return SimpleNamespace(used=700, total=1000)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        if self.utilization is None:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=self.utilization)
