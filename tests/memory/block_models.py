"""Small models made of blocks, one for each thing that recomputation could get wrong."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.parametrizations import spectral_norm

WIDTH = 8


class Residual(nn.Module):
    """Its width can differ, so that blocks differ in bytes and time."""

    def __init__(self, hidden: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Normalised(nn.Module):
    """Batch normalisation, and operations in place on what is not its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.activation = nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.activation(self.norm(self.first(x))))
        y += x
        return self.activation(y)


class PowerIterating(nn.Module):
    """Its output depends on a buffer that forward changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.activation = spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x))


class Counting(nn.Module):
    """Its output depends on an attribute and on a buffer that forward replaces."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(WIDTH, WIDTH), nn.Tanh()
        self.count = 0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.calls = self.calls + 1
        self.last = x.detach()
        return self.activation(self.linear(x) * self.count) + torch.sin(self.calls * x)


class InPlace(nn.Module):
    """Changes the tensor that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(WIDTH, WIDTH), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x.mul_(2)))


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Structured(nn.Module):
    """Tensors in a dict, a named tuple and a keyword argument, and None."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(WIDTH, WIDTH), nn.Tanh()

    def forward(self, pair: Pair, *, more: dict[str, Any]) -> Pair:
        left = self.activation(self.linear(pair.left)) * more["mask"]
        return Pair(left + pair.right, F.softplus(pair.right) if more["bias"] is None else pair.right)


class StructuredModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Structured() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).float()
        pair = Pair(x, x * 2)
        for block in self.blocks:
            pair = block(pair, more={"mask": mask, "bias": None})
        return pair.left + pair.right


class Shared(nn.Module):
    """Two blocks, each called several times in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(2 * WIDTH, 0.5), Residual(3 * WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 0, 1, 1):
            x = self.blocks[index](x)
        return x


class SideLoss(nn.Module):
    """One block's result is not used, and a tensor from outside is used by all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(2 * WIDTH) for _ in range(4))
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale(x).exp()
        total = x
        for index, block in enumerate(self.blocks):
            y = block(total * scale)
            total = total if index == 1 else total + y.sigmoid()
        return total


def _stack(make: Callable[[int], nn.Module], count: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*(make(index) for index in range(count))), nn.Tanh())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "residual": lambda: _stack(lambda index: Residual(WIDTH * (index + 1))),
    "dropout": lambda: _stack(lambda index: Residual(2 * WIDTH, dropout=0.5)),
    "normalised": lambda: _stack(lambda index: Normalised()),
    "power_iterating": lambda: _stack(lambda index: PowerIterating()),
    "counting": lambda: _stack(lambda index: Counting()),
    "structured": StructuredModel,
    "shared": Shared,
    "side_loss": SideLoss,
    "attention": lambda: _stack(
        lambda index: nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.3, batch_first=True, norm_first=True)
    ),
}
IN_PLACE: Callable[[], nn.Module] = lambda: _stack(lambda index: InPlace() if index == 2 else Residual())  # noqa: E731


def make(name: str) -> nn.Module:
    """One of `MODELS`, the same at each call."""
    torch.manual_seed(0)
    return MODELS[name]()


def inputs(name: str, step: int = 0) -> Tensor:
    """What the model takes: two dimensions for batch normalisation, else three."""
    x = torch.randn(6, 5, WIDTH, generator=torch.Generator().manual_seed(step))
    return x.flatten(0, 1) if name == "normalised" else x


def train(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """Loss and gradients of one step."""
    model.zero_grad(set_to_none=True)
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(one: Any, other: Any) -> bool:
    """Whether nested tensors are bitwise the same."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)
