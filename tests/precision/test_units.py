import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanSquaredError

from lightning_hpc.precision import find_units
from tests.memory.block_models import WIDTH, Residual


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.stages = nn.ModuleList([nn.Sequential(Residual(), Residual()), nn.Sequential(Residual(), Residual())])
        self.heads = nn.ModuleDict({"one": nn.Linear(WIDTH, 1), "two": nn.Linear(WIDTH, 2)})
        self.activation = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return x


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.loss, self.error = nn.CrossEntropyLoss(), MeanSquaredError()
        self.projection = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())


def test_blocks_and_what_lies_beside_them_in_the_order_of_the_model() -> None:
    assert list(find_units(Module()).modules) == [
        "net.stem",
        "net.stages.0.0",
        "net.stages.0.1",
        "net.stages.1.0",
        "net.stages.1.1",
        "net.heads.one",
        "net.heads.two",
        "projection",
    ]


def test_a_model_without_repeated_blocks_has_its_children() -> None:
    model = nn.Module()
    model.generator, model.critic = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 1)
    assert list(find_units(model).modules) == ["generator", "critic"]
    assert find_units(nn.Linear(2, 2)).modules == {}


def test_modules_that_are_named_are_all_there_is() -> None:
    assert list(find_units(Module(), ["net.stem", "projection"]).modules) == [
        "net.stem",
        "projection",
    ]
    with pytest.raises(ValueError, match="'Missing' is neither the name of a module nor that of a class"):
        find_units(Module(), ["Missing"])


def test_compiled_modules_are_refused() -> None:
    model = Module()
    model.projection = torch.compile(model.projection)  # type: ignore[assignment]
    model.net.stages[0][1].compile()
    found = find_units(model)
    assert set(found.refused) == {"net.stages.0.1", "projection"}
    assert "net.stem" in found.modules
