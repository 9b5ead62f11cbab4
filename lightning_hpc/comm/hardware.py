"""What NVML and /sys say of a rank's GPU: its place on the PCI bus, its NUMA node, its NVLinks."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_SYS = Path("/sys")
_NVLINK_MAX_LINKS = 18


@dataclass(frozen=True)
class Hardware:
    """The GPU of a rank and the NUMA nodes of its host; whatever is not known is None or empty.

    Attributes:
        numa_nodes: Number of NUMA nodes of the host.
        gpu: Name of the rank's GPU.
        gpu_uuid: Its UUID. NVML's index is not CUDA's, so this is how the two are matched.
        pci_bus: Its PCI bus id, such as ``"0000:1b:00.0"``.
        gpu_numa_node: NUMA node that it is attached to.
        nvlink_peers: PCI bus ids at the other end of its NVLinks, GPUs or switches, ascending.
    """

    numa_nodes: int | None = None
    gpu: str = ""
    gpu_uuid: str = ""
    pci_bus: str = ""
    gpu_numa_node: int | None = None
    nvlink_peers: tuple[str, ...] = ()

    def __str__(self) -> str:
        numa = "" if self.gpu_numa_node is None else f", NUMA node {self.gpu_numa_node}"
        links = f", NVLink to {', '.join(self.nvlink_peers)}" if self.nvlink_peers else ""
        return f"{self.gpu}, PCI {self.pci_bus or 'unknown'}{numa}{links}" if self.gpu else "no GPU"


def read_hardware(device: torch.device, sys: Path = _SYS) -> Hardware:
    """Reads what there is to know of ``device`` and of this host.

    Args:
        device: The rank's device.
        sys: Where the kernel's device tree is mounted.
    """
    numa_nodes = count_numa_nodes(_read(sys / "devices/system/node/online"))
    if device.type != "cuda":
        return Hardware(numa_nodes)
    properties = torch.cuda.get_device_properties(device)
    uuid = f"GPU-{properties.uuid}"
    with _nvml() as nvml:
        bus, peers = ("", ()) if nvml is None else read_nvlinks(nvml, uuid)
    node = _read(sys / "bus/pci/devices" / bus / "numa_node") if bus else ""
    # A host without NUMA says -1.
    return Hardware(numa_nodes, properties.name, uuid, bus, int(node) if node.isdigit() else None, peers)


def read_nvlinks(nvml: Any, uuid: str) -> tuple[str, tuple[str, ...]]:
    """The PCI bus id of a GPU and those at the other end of its active NVLinks.

    Args:
        nvml: The module `pynvml`, initialised.
        uuid: UUID of the GPU.
    """
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        bus = parse_bus_id(nvml.nvmlDeviceGetPciInfo(handle).busId)
    except nvml.NVMLError:  # a MIG slice, or a driver that hides the device
        return "", ()
    peers = set()
    for link in range(_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                peers.add(parse_bus_id(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId))
        except nvml.NVMLError:  # no such link, or NVLink not supported
            break
    return bus, tuple(sorted(peers))


def parse_bus_id(text: str | bytes) -> str:
    """The form that /sys uses, ``"0000:1b:00.0"``, of NVML's ``"00000000:1B:00.0"``."""
    name = (text.decode() if isinstance(text, bytes) else text).lower()
    domain, _, rest = name.partition(":")
    return f"{domain[-4:]}:{rest}"


def count_numa_nodes(online: str) -> int | None:
    """How many numbers a list like ``"0-1,3"`` of the kernel holds; None for an empty one."""
    if not online:
        return None
    spans = [part.partition("-") for part in online.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in spans)


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """The module `pynvml`, or None where it or the driver is missing."""
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
