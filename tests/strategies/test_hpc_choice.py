"""The invariant: while `compression="auto"` goes to plain DDP and back, training goes on as under `ddp`."""

from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_hpc.comm.hook import GradientReducer
from lightning_hpc.strategies import HPCStrategy
from tests.helpers import run_ranks
from tests.strategies.test_hpc import SCENARIOS, fit, make_trainer, relative_difference


class Alternation:
    """In place of the tuner: plain DDP and the exact hierarchy in turn."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer, self._steps = reducer, 0
        reducer.use("none")

    def finish_step(self) -> None:
        self._steps += 1
        self._reducer.use("ddp" if self._steps // 3 % 2 else "none")


class AlternatingStrategy(HPCStrategy):
    """Notes the bucket sizes, in MiB, that each step's wrapper was made with."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(compression="auto", **kwargs)
        self.caps: list[Any] = []

    def _make_tuner(self, reducer: GradientReducer, *args: Any) -> Any:
        return Alternation(reducer)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().training_step(*args, **kwargs)
        self.caps.append(self._ddp_kwargs.get("bucket_cap_mb"))
        return outputs


def _train(
    rank: int, world_size: int, model: type, model_kwargs: dict, ddp_kwargs: dict, trainer_kwargs: dict
) -> tuple[Tensor, Tensor, list[Any]]:
    alternating = AlternatingStrategy(topology=[[0], [1]], **ddp_kwargs)
    weights = []
    for strategy in (DDPStrategy(**ddp_kwargs), alternating):
        seed_everything(3, verbose=False)
        weights.append(fit(model(**model_kwargs), make_trainer(strategy, world_size, **trainer_kwargs)))
    assert alternating.comm_stats is not None
    assert alternating.comm_stats.bytes_sent.keys() == {"all_ranks", "inter_node"}
    return weights[0], weights[1], alternating.caps


@pytest.mark.parametrize(
    "scenario", ["plain", "unused and accumulation", "static graph", "bucket view and accumulation", "sparse", "manual"]
)
def test_same_weights_as_ddp_while_the_buckets_follow_the_choice(scenario: str) -> None:
    (ddp, first, caps), (_, second, _) = run_ranks(_train, 2, *SCENARIOS[scenario], init_gloo=False)
    assert relative_difference(first, ddp) <= 1e-6
    assert torch.equal(first, second)
    changes = [cap for cap, before in zip(caps, [0, *caps], strict=False) if cap != before]
    assert changes[:4] == [2, None, 2, None]


def _keep_buckets(rank: int, world_size: int) -> list[Any]:
    strategy = AlternatingStrategy(topology=[[0], [1]], bucket_cap_mb=3)
    fit(SCENARIOS["plain"][0](), make_trainer(strategy, world_size))
    return strategy.caps


def test_a_bucket_size_that_the_user_has_set_stays() -> None:
    for caps in run_ranks(_keep_buckets, 2, init_gloo=False):
        assert set(caps) == {3}
