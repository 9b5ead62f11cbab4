"""How far this host's Unix clock is from that of rank 0."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

_PINGS = 8
# Rank 0 answers one machine after the other, and all ranks wait for that.
_MOST_SECONDS = 2.0
_NO_TIME_LEFT = -1
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ClockOffset(NamedTuple):
    """A measured distance between two clocks.

    Attributes:
        offset_ms: Milliseconds that this host's clock is ahead of that of rank 0.
        uncertainty_ms: The most milliseconds by which that can be wrong, as long as no clock is set meanwhile.
    """

    offset_ms: float
    uncertainty_ms: float


def measure_clock_offset(
    group: dist.ProcessGroup | None,
    device: torch.device,
    *,
    clock_ns: Callable[[], int] = time.time_ns,
    machine: str | None = None,
) -> ClockOffset | None:
    """Compares this host's Unix clock with that of rank 0. A collective of the whole group.

    One rank of each machine asks rank 0 for the time, as NTP does: rank 0 has read its clock after the question was
    sent and before the answer was there, so half the round trip bounds the error. Of eight answers that with the
    shortest round trip counts. Ranks on the machine of rank 0 share its clock, and ask nothing. Machines whose turn has
    not come after two seconds stay without a figure.

    Args:
        group: All ranks whose traces are to be compared. None, or a group of one, has nothing to compare.
        device: Where the group's backend takes its tensors: the CPU for gloo, this rank's CUDA device for NCCL. A group
            on gloo measures more exactly, and on NCCL each machine gets a connection of its own to rank 0.
        clock_ns: The clock, in nanoseconds of Unix time.
        machine: What the ranks of a machine have in common, and no other. None means the kernel's boot id, which
            containers share with their host. Host names would not do: they need not be unique.

    Returns:
        The same for all ranks of a machine. None where there was no time left, or a clock was set back meanwhile.

    Raises:
        RuntimeError: If a rank is gone, or does not answer within the group's time-out.
    """
    if group is None or group.size() == 1:
        return ClockOffset(0.0, 0.0)
    rank = group.rank()
    # Without a boot id each rank is taken for a machine of its own.
    machines: list[str] = [""] * group.size()
    dist.all_gather_object(machines, _boot_id(rank) if machine is None else machine, group=group)
    leaders = sorted({machines.index(name) for name in machines})
    mine: ClockOffset | None = ClockOffset(0.0, 0.0)
    if rank == 0:
        _answer(leaders[1:], group, device, clock_ns)
    elif rank in leaders:
        mine = _ask(group, device, clock_ns)
    measured: list[ClockOffset | None] = [None] * group.size()
    dist.all_gather_object(measured, mine, group=group)
    return measured[machines.index(machines[rank])]


def _boot_id(rank: int) -> str:
    try:
        return _BOOT_ID.read_text()
    except OSError:
        return f"rank {rank}"


def _answer(ranks: list[int], group: dist.ProcessGroup, device: torch.device, clock_ns: Callable[[], int]) -> None:
    deadline = time.monotonic() + _MOST_SECONDS
    for rank in ranks:
        for _ in range(_PINGS):
            _receive(rank, group, device)
            is_late = time.monotonic() > deadline
            _send(_NO_TIME_LEFT if is_late else clock_ns(), rank, group, device)
            if is_late:
                break


def _ask(group: dist.ProcessGroup, device: torch.device, clock_ns: Callable[[], int]) -> ClockOffset | None:
    answers = []
    for _ in range(_PINGS):
        sent = clock_ns()
        _send(sent, 0, group, device)
        there = _receive(0, group, device)
        received = clock_ns()
        if there == _NO_TIME_LEFT:
            break
        if received >= sent:
            answers.append((received - sent, sent - there))
    if not answers:
        return None
    round_trip, behind = min(answers)
    return ClockOffset((behind + round_trip / 2) / 1e6, round_trip / 2e6)


def _send(value: int, rank: int, group: dist.ProcessGroup, device: torch.device) -> None:
    # A float has too few digits for nanoseconds since 1970.
    dist.send(torch.tensor([value], dtype=torch.int64, device=device), group=group, group_dst=rank)


def _receive(rank: int, group: dist.ProcessGroup, device: torch.device) -> int:
    value = torch.empty(1, dtype=torch.int64, device=device)
    dist.recv(value, group=group, group_src=rank)
    return int(value.item())  # NCCL only queues the transfer; this waits for it
