import pytest

from lightning_hpc.memory.nvml import NvmlDevice, NvmlReading
from tests.memory.fake_nvml import FakeNvml

UUID = "5f3c1a7e-0000-1111-2222-333344445555"


def test_a_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(f"GPU-{UUID}").install(monkeypatch)
    assert NvmlDevice(UUID).read() == NvmlReading(used_bytes=700, utilization=0.4)


def test_a_slice_of_a_gpu_has_no_utilization(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(f"MIG-{UUID}", utilization=None).install(monkeypatch)
    assert NvmlDevice(UUID).read() == NvmlReading(used_bytes=700, utilization=None)


def test_an_idle_gpu_is_not_one_without_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(f"GPU-{UUID}", utilization=0).install(monkeypatch)
    assert NvmlDevice(UUID).read().utilization == 0


@pytest.mark.parametrize("nvml", [FakeNvml("GPU-other"), FakeNvml(f"GPU-{UUID}", has_driver=False), None])
def test_what_is_unknown_stays_empty(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)
    device = NvmlDevice(UUID)
    assert device.read() == NvmlReading()
    device.close()
    assert nvml is None or nvml.users == 0


def test_nvml_is_given_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(f"GPU-{UUID}").install(monkeypatch)
    device = NvmlDevice(UUID)
    assert nvml.users == 1
    device.close()
    device.close()
    assert nvml.users == 0
    assert device.read() == NvmlReading()
