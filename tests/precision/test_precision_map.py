import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hpc.memory import CheckpointedBlocks, SavedActivations, find_blocks
from lightning_hpc.precision import PrecisionMap, find_units
from lightning_hpc.precision.memory_aware import KEEP_FLOAT32
from tests.memory.block_models import MODELS, WIDTH, equal, inputs, make, state, train

BF16 = torch.bfloat16


def mapped(model: nn.Module, dtype: torch.dtype = BF16, keep: Any = KEEP_FLOAT32) -> PrecisionMap:
    return PrecisionMap(find_units(model).modules, "cpu", dtype, keep)


def test_in_float32_nothing_changes() -> None:
    for name in MODELS:
        plain, other = make(name), make(name)
        precision_map = mapped(other)
        for step in range(3):
            results = []
            for model in (plain, other):
                torch.manual_seed(step)
                results.append((train(model, inputs(name, step)), state(model), torch.get_rng_state()))
            assert equal(*results)
        precision_map.remove()
        assert all("forward" not in vars(module) for module in other.modules())


class Spy(nn.Module):
    """Notes in what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.seen: list[Any] = []
        self.norm.register_forward_pre_hook(lambda module, args: self.seen.append(args[0].dtype))
        self.norm.register_forward_hook(lambda module, args, output: self.seen.append(output.dtype))

    def forward(self, x: Tensor, more: dict[str, Tensor]) -> dict[str, Any]:
        y = self.linear(x)
        self.seen += [x.dtype, y.dtype, torch.is_autocast_enabled("cpu")]
        return {"y": self.inner(self.norm(y)), "pair": (y, 1), "count": more["count"]}


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_low_unit_computes_low_and_gives_float32(dtype: torch.dtype) -> None:
    unit = Spy()
    precision_map = PrecisionMap({"spy": unit}, "cpu", dtype, KEEP_FLOAT32)
    precision_map.set_low(["spy"])
    outputs = unit(torch.randn(3, WIDTH), more={"count": torch.ones(2, dtype=torch.int64)})
    # The normalisation gets what the linear layer made; its own forward sees it in float32.
    assert unit.seen == [torch.float32, dtype, True, dtype, torch.float32]
    assert outputs["y"].dtype == outputs["pair"][0].dtype == torch.float32
    assert outputs["count"].dtype == torch.int64
    assert not torch.is_autocast_enabled("cpu")
    assert precision_map.low == precision_map.names == ["spy"]
    precision_map.set_low([])
    unit.seen.clear()
    unit(torch.randn(3, WIDTH), more={"count": torch.ones(2)})
    assert unit.seen[1:3] == [torch.float32, False]


def test_patterns_name_modules_and_classes_and_what_fits_nothing_is_told() -> None:
    unit = Spy()
    precision_map = PrecisionMap({"net.spy": unit}, "cpu", BF16, ["net.*.inner", "LayerNorm", "router"])
    assert precision_map.unmatched == ["router"]
    precision_map.set_low(["net.spy"])
    seen = []
    unit.inner.register_forward_hook(lambda module, args, output: seen.append((args[0].dtype, output.dtype)))
    unit(torch.randn(3, WIDTH), more={"count": torch.ones(2)})
    assert seen == [(torch.float32, torch.float32)]
    assert PrecisionMap({"net.spy": Spy()}, "cpu", BF16, ["Spy"]).names == []


def test_a_copy_is_like_the_original_and_a_pickled_one_is_plain() -> None:
    model = make("residual")
    precision_map = mapped(model)
    precision_map.set_low(precision_map.names)
    x = inputs("residual")
    twin = copy.deepcopy(model)
    assert torch.equal(model(x), twin(x))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not torch.equal(model(x), twin(x))
    plain = pickle.loads(pickle.dumps(model))
    precision_map.remove()
    assert torch.equal(plain(x), model(x))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "normalised"])
def test_recomputed_blocks_have_the_precision_and_gradients_of_the_forward(name: str) -> None:
    plain, other = make(name), make(name)
    for model in (plain, other):
        precision_map = mapped(model)
        precision_map.set_low(precision_map.names)
    with CheckpointedBlocks(find_blocks(other).modules):
        for step in range(2):
            results = []
            for model in (plain, other):
                torch.manual_seed(step)
                results.append((train(model, inputs(name, step)), state(model)))
            assert equal(*results)


class UserCheckpointed(nn.Module):
    def __init__(self, *, is_on: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.is_on = is_on

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=False) if self.is_on else self.layers(x)


def test_a_checkpoint_of_the_users_inside_a_unit() -> None:
    results = []
    for is_on in (False, True):
        torch.manual_seed(0)
        unit = UserCheckpointed(is_on=is_on)
        PrecisionMap({"unit": unit}, "cpu", BF16).set_low(["unit"])
        results.append(train(unit, inputs("residual")))
    assert equal(*results)


def peak(model: nn.Module, x: Tensor) -> int:
    with SavedActivations([*model.parameters(), *model.buffers(), x]) as saved:
        train(model, x)
    return saved.peak_bytes


def test_measuring_changes_nothing_and_counts_what_is_saved() -> None:
    model, plain = make("residual"), make("residual")
    precision_map = mapped(model)
    x = inputs("residual")
    for low in ([], precision_map.names):
        precision_map.set_low(low)
        expected = peak(model, x)
        with precision_map.measured() as meter:
            result = train(model, x)
        if not low:
            assert equal(result, train(plain, x))
        outside = 4 * x.numel()  # Tanh and the square, which are in no unit
        assert expected - 3 * outside <= sum(meter.saved.values()) <= expected
        assert meter.inputs == {name: x.numel() for name in precision_map.names}
    assert all(
        not module.forward.__func__.meter
        for module in model.modules()
        if "forward" in vars(module) and hasattr(module.forward.__func__, "meter")
    )


def test_a_checkpointed_unit_is_measured_as_what_it_has_when_it_is_recomputed() -> None:
    model = make("residual")
    precision_map = mapped(model)
    with precision_map.measured() as plain:
        train(model, inputs("residual"))
    with CheckpointedBlocks(find_blocks(model).modules), precision_map.measured() as checkpointed:
        train(model, inputs("residual"))
    assert plain.saved == checkpointed.saved


def test_an_outer_autocast_of_the_users_does_not_lose_gradients_when_the_map_changes() -> None:
    model = make("residual")
    precision_map = mapped(model)
    with torch.autocast("cpu", BF16):
        with torch.no_grad():
            model(inputs("residual"))  # casts without a gradient come into the cache
        precision_map.set_low(precision_map.names)
        loss = model(inputs("residual")).float().sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
