"""One thing after the other on all ranks, failures included."""

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_hpc.commands.launcher import find_launcher
from lightning_hpc.commands.ranks import Ranks
from tests.helpers import run_ranks


def _sum() -> float:
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    return float(total)


def _fail_on_rank_1() -> float:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
    return _sum()  # waits for rank 1 in vain


def _calls(rank: int, world_size: int) -> list[Any]:
    environment = find_launcher()
    assert environment is not None
    with Ranks(environment, "gloo", timedelta(seconds=2)) as ranks:
        outcomes = [ranks.call(_sum), ranks.call(_fail_on_rank_1), ranks.call(_sum)]
    return json.loads(json.dumps([(outcome.values, outcome.error) for outcome in outcomes]))


def test_a_call_that_fails_on_one_rank_leaves_the_next_one_whole() -> None:
    first, second = run_ranks(_calls, 2, init_gloo=False)
    assert (
        first == second == [[[3.0, 3.0], None], [[], "rank 1: ValueError: rank 1 has had enough"], [[3.0, 3.0], None]]
    )
