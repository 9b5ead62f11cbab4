"""What each rank knows of its own place: host, network interface, GPU. Hints and names, never the decision."""

import os
import socket
import struct
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_hpc.comm.hardware import Hardware, read_hardware

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (files of our own with random names)
_NET = Path("/sys/class/net")


@dataclass(frozen=True)
class RankFacts:
    """Where a rank runs.

    Attributes:
        host: Host name. Containers may share one, and one host may have several.
        machine: The kernel's boot id, equal for all containers of a machine; empty where there is none.
        network: The network namespace, comparable on one machine.
        interface: Network interface that carries the traffic, as far as the environment and the routes tell; or empty.
        interface_mbit: Its nominal speed, or None where the system has no figure.
        faster_interface: Another physical interface that is up and has at least ten times that speed, or empty.
        hardware: The rank's GPU and the host's NUMA nodes.
    """

    host: str
    machine: str
    network: str
    interface: str
    interface_mbit: int | None
    faster_interface: str
    hardware: Hardware


def read_facts(device: torch.device) -> RankFacts:
    """The facts of this process."""
    interface = _interface("NCCL_SOCKET_IFNAME" if device.type == "cuda" else "GLOO_SOCKET_IFNAME")
    speed = _nominal_mbit(interface)
    return RankFacts(
        host=socket.gethostname(),
        machine=_read(Path("/proc/sys/kernel/random/boot_id")),
        network=_link("/proc/self/ns/net"),
        interface=interface,
        interface_mbit=speed,
        faster_interface=_faster_interface(interface, speed),
        hardware=read_hardware(device),
    )


def gather_facts(facts: RankFacts, group: dist.ProcessGroup) -> tuple[list[RankFacts], list[int]]:
    """All ranks' facts, and for each rank the lowest rank that it shares a host with. A collective.

    Two ranks share a host if one finds in /dev/shm a file that the other has just made there. Where that folder cannot
    be written, machine, network namespace and host name decide.
    """
    nonce = _make_nonce()
    try:
        made: list[tuple[RankFacts, str]] = [(facts, nonce)] * group.size()
        dist.all_gather_object(made, (facts, nonce), group=group)
        seen = [bool(name) and (_SHARED_MEMORY / name).exists() for _, name in made]
        views: list[list[bool]] = [seen] * group.size()
        dist.all_gather_object(views, seen, group=group)
    finally:
        if nonce:
            (_SHARED_MEMORY / nonce).unlink(missing_ok=True)
    everyone = [facts for facts, _ in made]
    return everyone, hosts_of(everyone, [bool(name) for _, name in made], views)


def hosts_of(facts: Sequence[RankFacts], has_file: Sequence[bool], sees: Sequence[Sequence[bool]]) -> list[int]:
    """For each rank the lowest rank on its host.

    Args:
        facts: What each rank says of itself.
        has_file: Whether a rank could make a file in shared memory.
        sees: ``sees[a][b]``: rank a finds rank b's file.
    """

    def together(a: int, b: int) -> bool:
        if has_file[a] and has_file[b]:
            return sees[a][b] and sees[b][a]
        return _identity(facts[a]) == _identity(facts[b])

    return [next(low for low in range(rank + 1) if low == rank or together(low, rank)) for rank in range(len(facts))]


def _identity(facts: RankFacts) -> tuple[str, str, str]:
    return facts.machine, facts.network, facts.host


def _make_nonce() -> str:
    name = f"lightning_hpc.{uuid.uuid4().hex}"
    try:
        (_SHARED_MEMORY / name).touch()
    except OSError:
        return ""
    return name


def _interface(variable: str) -> str:
    """The interface that a variable names, or the one on the way to rank 0's machine."""
    named = os.environ.get(variable, "").split(",")[0].lstrip("=")
    if named and not named.startswith("^") and (_NET / named).exists():
        return named
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
            probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
            address = probe.getsockname()[0]
    except OSError:
        return ""
    return next((name for name in _interfaces() if _address(name) == address), "")


def _interfaces() -> list[str]:
    return sorted(path.name for path in _NET.iterdir()) if _NET.is_dir() else []


def _address(interface: str) -> str:
    """The IPv4 address of an interface, or empty."""
    if sys.platform != "linux":
        return ""
    import fcntl

    siocgifaddr = 0x8915
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), siocgifaddr, request)[20:24])
        except OSError:  # it has none
            return ""


def _nominal_mbit(interface: str) -> int | None:
    text = _read(_NET / interface / "speed") if interface else ""
    return int(text) if text.isdigit() and int(text) > 0 else None  # a link that is down says -1


def _faster_interface(used: str, mbit: int | None) -> str:
    """A physical interface with an address and ten times the speed. Virtual ones claim speeds that they do not have."""
    if mbit is None or not (_NET / used / "device").exists():
        return ""
    for name in _interfaces():
        speed = _nominal_mbit(name)
        if speed and speed >= 10 * mbit and (_NET / name / "device").exists() and _address(name):
            return name
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 (Path.readlink would make a path of "net:[4026531840]")
    except OSError:
        return ""
