from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hpc.comm.hardware import Hardware, count_numa_nodes, parse_bus_id, read_hardware, read_nvlinks

UUID = "GPU-5f3c1a7e-0000-1111-2222-333344445555"


class FakeNvml:
    """As much of `pynvml` as is asked: one GPU with links to the given bus ids, None for one that is down."""

    class NVMLError(Exception):
        pass

    def __init__(self, uuid: str, bus: Any, links: list[Any]) -> None:
        self._uuid, self._bus, self._links = uuid, bus, links

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != self._uuid:
            raise self.NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetPciInfo(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(busId=self._bus)

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:  # noqa: N802
        if link >= len(self._links):
            raise self.NVMLError("Invalid Argument")
        return int(self._links[link] is not None)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: str, link: int) -> Any:  # noqa: N802
        return SimpleNamespace(busId=self._links[link])


@pytest.mark.parametrize(("text", "count"), [("0", 1), ("0-1", 2), ("0-1,3", 3), ("0,2,4-7", 6), ("", None)])
def test_numa_nodes_of_the_kernels_list(text: str, count: int | None) -> None:
    assert count_numa_nodes(text) == count


@pytest.mark.parametrize("recorded", ["00000000:1B:00.0", b"00000000:1B:00.0", "0000:1b:00.0"])
def test_bus_ids_as_sys_writes_them(recorded: str | bytes) -> None:
    assert parse_bus_id(recorded) == "0000:1b:00.0"


def test_nvlinks_to_two_peers_over_several_links() -> None:
    nvml = FakeNvml(UUID, b"00000000:1B:00.0", ["00000000:43:00.0", None, "00000000:3D:00.0", "00000000:43:00.0"])
    assert read_nvlinks(nvml, UUID) == ("0000:1b:00.0", ("0000:3d:00.0", "0000:43:00.0"))


def test_a_gpu_without_nvlink() -> None:
    assert read_nvlinks(FakeNvml(UUID, "00000000:1B:00.0", []), UUID) == ("0000:1b:00.0", ())


def test_a_gpu_that_nvml_does_not_know() -> None:
    assert read_nvlinks(FakeNvml("other", "", []), UUID) == ("", ())


def test_a_cpu_rank_knows_its_hosts_numa_nodes(tmp_path: Path) -> None:
    (tmp_path / "devices/system/node").mkdir(parents=True)
    (tmp_path / "devices/system/node/online").write_text("0-3\n")
    assert read_hardware(torch.device("cpu"), tmp_path) == Hardware(numa_nodes=4)


def test_a_system_without_any_of_it(tmp_path: Path) -> None:
    assert read_hardware(torch.device("cpu"), tmp_path) == Hardware()


@pytest.mark.parametrize(("recorded", "node"), [("1\n", 1), ("-1\n", None)])
def test_a_cuda_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: str, node: int | None) -> None:
    device = tmp_path / "bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(recorded)
    nvml = FakeNvml(UUID, "00000000:1B:00.0", ["00000000:43:00.0"])
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)
    properties = SimpleNamespace(name="NVIDIA H100", uuid=UUID.removeprefix("GPU-"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    hardware = read_hardware(torch.device("cuda", 0), tmp_path)
    assert hardware == Hardware(None, "NVIDIA H100", UUID, "0000:1b:00.0", node, ("0000:43:00.0",))
    assert str(hardware).startswith("NVIDIA H100, PCI 0000:1b:00.0")


def test_without_nvml_the_gpu_still_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="NVIDIA H100", uuid="1"))
    assert read_hardware(torch.device("cuda", 0), tmp_path) == Hardware(gpu="NVIDIA H100", gpu_uuid="GPU-1")
