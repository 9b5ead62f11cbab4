import multiprocessing
import os
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from lightning_hpc.comm.background_gather import BackgroundGather
from tests.helpers import free_port, run_ranks


def wait_for(gather: BackgroundGather) -> Any:
    return gather.take(wait_s=60)


def gather_twice(rank: int, world_size: int) -> list[Any]:
    gather = BackgroundGather()
    for turn in range(2):
        gather.start(np.full((3, 2), 10.0 * turn + rank))
    taken = [wait_for(gather), wait_for(gather), gather.take()]
    assert gather.pending == 0
    gather.close()
    gather.close()
    gather.start(np.zeros((3, 2)))
    assert gather.pending == 0
    return taken


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_get_all_arrays_in_order(ranks: int) -> None:
    for first, second, nothing in run_ranks(gather_twice, ranks):
        assert first.shape == (ranks, 3, 2)
        np.testing.assert_array_equal(first[:, 0, 0], np.arange(ranks))
        np.testing.assert_array_equal(second[:, 0, 0], 10 + np.arange(ranks))
        assert nothing is None


def run_ahead(rank: int, world_size: int) -> tuple[int, str | None]:
    gather = BackgroundGather()
    if rank == 0:
        for _ in range(20):
            gather.start(np.zeros(2))
            assert gather.take() is None
    dist.barrier()
    gather.close()
    return gather.pending, gather.failure


def test_a_rank_far_ahead_stops_and_keeps_no_more() -> None:
    assert run_ranks(run_ahead, 2) == [(16, "the slowest rank is 16 exchanges behind"), (0, None)]


def end_unevenly(rank: int, port: int, peer_dies: bool, other_has_ended: Event) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    gather = BackgroundGather()
    gather.start(np.zeros(2))
    assert wait_for(gather) is not None
    if rank == 0:
        gather.start(np.ones(2))
        assert gather.take() is None
    dist.barrier()
    if rank == 1:
        assert peer_dies or other_has_ended.wait(timeout=60)
        os._exit(0)
    if peer_dies:
        assert wait_for(gather) is None
        assert gather.failure
        gather.start(np.ones(2))
        assert gather.pending == 0
    gather.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("peer_dies", [True, False])
def test_a_process_ends_though_its_peer_never_answers(peer_dies: bool) -> None:
    context = multiprocessing.get_context("forkserver")
    has_ended = context.Event()
    port = free_port()
    first, second = (context.Process(target=end_unevenly, args=(rank, port, peer_dies, has_ended)) for rank in range(2))
    first.start()
    second.start()
    try:
        first.join(timeout=60)  # gloo's own time-out is half an hour
        assert first.exitcode == 0
        has_ended.set()
        second.join(timeout=60)
        assert second.exitcode == 0
    finally:
        for process in (first, second):
            process.kill()
            process.join()
