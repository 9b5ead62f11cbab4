import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hpc.memory import SavedActivations
from lightning_hpc.precision.weight_casts import recast_weights
from tests.memory.block_models import equal


class Matmul(nn.Module):
    """Uses parameters in other ways than layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,hij->bhj", x @ self.one.t() @ self.one, self.other) @ self.other[1]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x).relu())


class Frozen(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.one.weight.requires_grad_(False)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.lstm(x.unflatten(0, (2, -1)))[0])[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(0, (2, -1))
        return self.attention(x, x, x, need_weights=False)[0]


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(8, 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x)


def image(x: Tensor) -> Tensor:
    return x.unflatten(1, (2, 2, 2))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat, self.deep = nn.Conv2d(2, 4, 1), nn.Conv3d(1, 2, 1)
        self.line, self.up = nn.Conv1d(4, 3, 3, padding=1), nn.ConvTranspose1d(3, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.flat(image(x))
        return self.up(self.line(y.flatten(2))).mean() + self.deep(image(x).unsqueeze(1)).square().sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4, bias=False)),
    "convolutions": Convolutions,
    "recurrent": Recurrent,
    "attention": Attention,
    "bilinear": Bilinear,
    "matmul": Matmul,
    "tied": Tied,
    "frozen": Frozen,
}


def train(model: nn.Module, dtype: torch.dtype, is_recast: bool) -> Any:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    model.zero_grad()
    with torch.autocast("cpu", dtype):
        if is_recast:
            with recast_weights(dtype):
                loss = model(x).float().square().sum()
        else:
            loss = model(x).float().square().sum()
    loss.backward()
    return loss.detach(), x.grad, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_bitwise_those_of_autocast_alone(name: str, dtype: torch.dtype) -> None:
    if (name, dtype) == ("recurrent", torch.float16):
        pytest.skip("PyTorch has no LSTM in float16 on the CPU")
    torch.manual_seed(0)
    model = MODELS[name]()
    assert equal(train(model, dtype, False), train(model, dtype, True))


def saved_bytes(model: nn.Module, is_recast: bool) -> int:
    with SavedActivations(model.parameters()) as saved:
        train(model, torch.bfloat16, is_recast)
    return saved.peak_bytes


def test_casts_of_trained_weights_are_not_kept_and_those_of_frozen_ones_are() -> None:
    layers = nn.Sequential(nn.Linear(8, 1000), nn.Linear(1000, 8))
    cast_bytes = 2 * 2 * 8000
    assert saved_bytes(layers, False) - saved_bytes(layers, True) == cast_bytes
    layers[1].weight.requires_grad_(False)
    assert saved_bytes(layers, False) - saved_bytes(layers, True) == cast_bytes // 2


def test_backward_twice_and_of_backward() -> None:
    torch.manual_seed(0)
    model = MODELS["linear"]()
    results = []
    for is_recast in (False, True):
        model.zero_grad()
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(2), requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            if is_recast:
                with recast_weights(torch.bfloat16):
                    loss = model(x).float().square().sum()
            else:
                loss = model(x).float().square().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        gradient.square().sum().backward(retain_graph=True)
        loss.backward()
        results.append([gradient.detach(), *(parameter.grad for parameter in model.parameters())])
    assert equal(*results)


def test_a_parameter_that_changes_before_backward_is_an_error() -> None:
    layer = nn.Linear(8, 8)
    x = torch.randn(2, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), recast_weights(torch.bfloat16):
        loss = layer(x).sum()
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(8, 8\) was changed in place"):
        loss.backward()


def test_a_tensor_that_changes_before_backward_is_an_error_as_without() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    with recast_weights(torch.bfloat16):
        y = x.exp()
        loss = y.sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="was changed in place after it was saved"):
        loss.backward()


def test_nothing_is_kept_alive() -> None:
    with recast_weights(torch.bfloat16):
        y = torch.randn(4, requires_grad=True).exp()
    reference = weakref.ref(y.untyped_storage())
    del y
    gc.collect()
    assert reference() is None
