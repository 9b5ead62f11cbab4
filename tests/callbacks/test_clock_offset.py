import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_hpc.callbacks import clock_offset
from lightning_hpc.callbacks.clock_offset import ClockOffset, measure_clock_offset
from tests.helpers import run_ranks

CPU = torch.device("cpu")
AHEAD_MS = {"a": 0.0, "b": -1234.5}


def planted_ns(ahead_ms: float) -> int:
    return time.time_ns() + round(ahead_ms * 1e6)


def measure_planted(rank: int, world_size: int, machines: list[str]) -> ClockOffset | None:
    machine = machines[rank]
    clock_ns = partial(planted_ns, AHEAD_MS.get(machine, 40.0 * rank))
    return measure_clock_offset(dist.group.WORLD, CPU, clock_ns=clock_ns, machine=machine)


def test_planted_offsets_are_found_within_their_uncertainty_once_a_machine() -> None:
    found = run_ranks(measure_planted, 5, ["a", "b", "a", "c", "b"])
    assert found[0] == found[2] == ClockOffset(0.0, 0.0)
    assert found[1] == found[4]
    for measured, planted in ((found[1], -1234.5), (found[3], 120.0)):
        assert measured is not None
        assert 0 < measured.uncertainty_ms < 1000
        assert measured.offset_ms == pytest.approx(planted, abs=measured.uncertainty_ms)


def measure_here(rank: int, world_size: int) -> ClockOffset | None:
    def no_clock() -> int:
        raise AssertionError("ranks of one kernel have one clock")

    return measure_clock_offset(dist.group.WORLD, CPU, clock_ns=no_clock)


def test_ranks_of_one_kernel_ask_nothing() -> None:
    assert run_ranks(measure_here, 3) == [ClockOffset(0.0, 0.0)] * 3


def measure_in_subgroup(rank: int, world_size: int) -> ClockOffset | None:
    """Ranks 3 and 1, in a group in which they have other numbers; then without boot ids."""
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    clock_offset._BOOT_ID = Path("/nonexistent")
    return measure_clock_offset(group, CPU, clock_ns=partial(planted_ns, 1e6 * rank))


def test_ranks_are_those_of_the_group_and_without_boot_ids_all_ask() -> None:
    found = run_ranks(measure_in_subgroup, 4)
    assert found[1] == ClockOffset(0.0, 0.0)
    assert found[3] is not None
    assert found[3].offset_ms == pytest.approx(2e6, abs=found[3].uncertainty_ms)


def measure_without_time(rank: int, world_size: int) -> ClockOffset | None:
    clock_offset._MOST_SECONDS = -1.0
    return measure_planted(rank, world_size, ["a", "b", "c"])


def test_machines_whose_turn_comes_too_late_have_no_figure() -> None:
    assert run_ranks(measure_without_time, 3) == [ClockOffset(0.0, 0.0), None, None]


def measure_with_a_clock_set_back(rank: int, world_size: int) -> ClockOffset | None:
    times = iter(range(10**18, 0, -1))
    clock_ns: Callable[[], int] = partial(next, times)
    return measure_clock_offset(dist.group.WORLD, CPU, clock_ns=clock_ns, machine=str(rank))


def test_a_clock_that_is_set_back_meanwhile_has_no_figure() -> None:
    assert run_ranks(measure_with_a_clock_set_back, 2) == [ClockOffset(0.0, 0.0), None]


def test_one_rank_has_nothing_to_compare() -> None:
    assert measure_clock_offset(None, CPU) == ClockOffset(0.0, 0.0)
