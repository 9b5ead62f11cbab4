from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_hpc.memory import CallableProbe, MemoryReading
from lightning_hpc.precision import PrecisionMap
from lightning_hpc.precision.switch_controller import SwitchController
from lightning_hpc.precision.switch_policy import SwitchPolicy
from tests.precision.random_switching import run_sequence

WIDTH = 8


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_random_pressure_leaves_all_ranks_with_the_same_map(first: int) -> None:
    reasons = {switch.reason for seed in range(first, first + 50) for switch in run_sequence(seed)}
    assert reasons == {"pressure", "calm", "useless"}


class Attention(nn.Module):
    """What it saves grows with the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x)
        return x + self.out((y @ y.transpose(-1, -2)).sigmoid() @ y)  # type: ignore[no-any-return]


class Elementwise(nn.Module):
    """Autocast leaves all of it in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sigmoid_().mul(self.scale).tanh_()


class Loop:
    """Steps of one rank, as the plugin makes them."""

    def __init__(self, unit: nn.Module, percents: list[int], **kwargs: Any) -> None:
        self.unit = unit
        self.map = PrecisionMap({"unit": unit}, "cpu", torch.bfloat16)
        self.policy = SwitchPolicy(["unit"], 0.9, 0.7, 10)
        self.percents = percents
        probe = CallableProbe(lambda: MemoryReading(self.percents[0], 100))
        self.exchange: Any = Alone(**kwargs)
        self.controller = SwitchController(self.map, self.policy, probe, self.exchange, 2)
        self.reasons: list[str] = []

    def step(self, length: int = 16) -> None:
        self.reasons += [switch.reason for switch in self.controller.begin_step()]
        x = torch.randn(4, length, WIDTH)
        if self.controller.wants_measurement:
            with self.controller.measured_forward():
                self.unit(x).sum().backward()
        else:
            self.unit(x).sum().backward()


class Alone:
    def __init__(self, *, is_broken: bool = False) -> None:
        self.failure = None
        self.is_broken = is_broken
        self.values: NDArray[np.float64] | None = None

    def start(self, values: NDArray[np.float64]) -> None:
        self.values = values

    def take(self, wait_s: float = 0.0) -> NDArray[np.float64] | None:
        return None if self.is_broken or self.values is None else self.values[np.newaxis]


@pytest.mark.parametrize("lengths", [(16, 256), (256, 16), (16, 16)])
def test_batches_of_other_sizes_do_not_make_a_good_unit_look_useless(lengths: tuple[int, int]) -> None:
    short, other = lengths
    loop = Loop(Attention(), [95])
    for length in (short, short, *[other] * 4, *[short] * 6):
        loop.step(length)
    assert loop.reasons == ["pressure"]
    assert loop.policy.bytes["unit"].is_measured


def test_a_unit_that_saves_nothing_is_found_out_when_a_batch_has_the_size_of_the_first() -> None:
    loop = Loop(Elementwise(), [95])
    for length in (16, 16, 32, 32, 32, 32):
        loop.step(length)
    assert loop.reasons == ["pressure"]
    for _ in range(12):
        loop.step(16)
    assert loop.reasons == ["pressure", "useless"]
    assert loop.policy.useless == ["unit"]
    assert loop.map.low == []


def test_measuring_ends_when_all_that_is_low_has_been_measured() -> None:
    loop = Loop(Attention(), [95])
    for _ in range(5):
        loop.step()
    measured = []
    for _ in range(6):
        loop.step()
        measured.append(loop.controller.wants_measurement)
    assert measured == [False] * 6


def test_where_a_peer_is_gone_nothing_is_switched() -> None:
    loop = Loop(Attention(), [95], is_broken=True)
    for _ in range(6):
        loop.step()
    assert loop.reasons == []
    assert loop.controller.state_dict()["gathered"] is None


def test_readings_on_their_way_and_measurements_go_through_a_checkpoint() -> None:
    for steps in range(1, 8):
        loop = Loop(Attention(), [95])
        for _ in range(steps):
            loop.step()
        twin = Loop(Attention(), [95])
        twin.policy.load_state_dict(loop.policy.state_dict())
        twin.map.set_low(twin.policy.lowered)
        twin.controller.load_state_dict(loop.controller.state_dict())
        before = len(loop.reasons)
        for _ in range(4):
            loop.step()
            twin.step()
        assert loop.reasons[before:] == twin.reasons, steps
        assert loop.controller.state_dict() == twin.controller.state_dict()
        assert loop.policy.state_dict() == twin.policy.state_dict()


def test_readings_of_a_model_with_other_units_are_dropped() -> None:
    loop = Loop(Attention(), [95])
    for _ in range(2):
        loop.step()
    state = loop.controller.state_dict()
    assert state["gathered"] is not None
    state["gathered"] = [[*row, 1, 1, 1, 1] for row in state["gathered"]]
    twin = Loop(Attention(), [95])
    twin.controller.load_state_dict(state)
    twin.step()
    assert twin.reasons == []
