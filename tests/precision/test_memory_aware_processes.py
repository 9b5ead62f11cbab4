"""`MemoryAwarePrecision` where several processes train."""

import os
import warnings
from typing import Any

import pytest

from lightning_hpc.precision import Switch
from lightning_hpc.strategies import HPCStrategy
from tests.helpers import RanksFailedError, run_ranks
from tests.memory.block_models import equal
from tests.precision.plugin_models import CALM, HIGH, Manual, Module, everything, fit, make_plugin

Result = tuple[Any, list[tuple[str, list[str]]], list[Switch]]


def strategy_of(name: str) -> Any:
    return HPCStrategy(topology=[[0], [1]]) if name == "hpc" else name


def fit_on_ranks(rank: int, world_size: int, strategy: str, scripts: list[list[int]] | None, make: Any) -> Result:
    warnings.simplefilter("ignore")
    plugin = None if scripts is None else make_plugin(scripts[rank], "fp16")
    module = make()
    trainer = fit(module, plugin=plugin, devices=world_size, strategy=strategy_of(strategy), max_steps=10)
    return everything(trainer), module.maps, [] if plugin is None else plugin.switches


@pytest.mark.parametrize("strategy", ["ddp", "hpc"])
def test_without_pressure_each_rank_is_bitwise_as_without_the_plugin(strategy: str) -> None:
    plain = run_ranks(fit_on_ranks, 2, strategy, None, Module, init_gloo=False)
    others = run_ranks(fit_on_ranks, 2, strategy, [[CALM], [CALM]], Module, init_gloo=False)
    for (one, _, _), (other, _, _) in zip(plain, others, strict=True):
        assert equal(one, other)


@pytest.mark.parametrize("make", [Module, Manual])
@pytest.mark.parametrize("strategy", ["ddp", "hpc"])
def test_pressure_on_one_rank_switches_all_in_the_same_step(strategy: str, make: Any) -> None:
    scripts = [[CALM], [CALM, CALM, HIGH, CALM]]
    (first, maps, switches), (second, other_maps, other_switches) = run_ranks(
        fit_on_ranks, 2, strategy, scripts, make, init_gloo=False
    )
    assert maps == other_maps
    assert switches == other_switches
    assert [switch.reason for switch in switches] == ["pressure"]
    weights = [
        {name: value for name, value in each["module"].items() if "running" not in name} for each in (first, second)
    ]
    assert equal(*weights)  # the running statistics are those of each rank's samples
    assert maps[0][1] == []
    assert maps[-1][1] != []


class Dies(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and batch_idx == 4:
            os._exit(1)


@pytest.mark.parametrize("strategy", ["ddp", "hpc"])
def test_a_rank_that_dies_leaves_nobody_waiting(strategy: str) -> None:
    # The survivor ends with an error of its own, where the time-out of a collective is half an hour.
    with pytest.raises(RanksFailedError, match=r"(?s)rank 0: Traceback.*RuntimeError.*rank 1: died without a word"):
        run_ranks(fit_on_ranks, 2, strategy, [[CALM], [CALM]], Dies, init_gloo=False, timeout=80)
