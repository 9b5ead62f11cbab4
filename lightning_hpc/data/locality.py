"""Processors and memory on the side of the machine where a CUDA device is."""

import contextlib
import os
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import torch
from torch import cuda

_SYS = Path("/sys")


def cpus_near(device: str | torch.device | None, num_workers: int, sys: Path = _SYS) -> frozenset[int]:
    """The processors next to a CUDA device, for the workers whose batches go there.

    Empty if there is none to prefer: if the device is not one of CUDA, or that is not in use yet, since workers start
    before; if the kernel names none; if this process may not use them all, or no others; if there are more workers.

    Args:
        device: Where batches go.
        num_workers: How many workers there are.
        sys: Where the kernel's device tree is mounted.
    """
    found = torch.device("cpu" if device is None else device)
    if found.type != "cuda" or not cuda.is_initialized():
        return frozenset()
    properties: Any = cuda.get_device_properties(found)  # its stub lacks the place on the bus
    bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        near = parse_cpus((sys / "bus/pci/devices" / bus / "local_cpulist").read_text())
    except OSError:
        return frozenset()
    return near if num_workers <= len(near) and near < os.sched_getaffinity(0) else frozenset()


def parse_cpus(text: str) -> frozenset[int]:
    """The numbers in a list of the kernel, such as ``"0-3,8-11"``."""
    spans = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1))


@contextlib.contextmanager
def running_on(cpus: Set[int]) -> Iterator[None]:
    """Lets this thread run on some processors only, so that the memory that it takes is theirs; none are all."""
    before = os.sched_getaffinity(0)
    stay_on(cpus)
    try:
        yield
    finally:
        stay_on(before)


def stay_on(cpus: Set[int]) -> None:
    """Lets this thread, and what it starts, run on some processors only, if that is still allowed; none are all."""
    if cpus and cpus != os.sched_getaffinity(0):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)
