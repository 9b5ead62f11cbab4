import pytest
import torch
from torch import nn

from examples.language_model import LanguageModel
from lightning_hpc.memory import find_blocks
from tests.memory.block_models import Residual


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(), Residual()])


def names(model: nn.Module, wanted: list[str | type[nn.Module]] | None = None) -> list[str]:
    return list(find_blocks(model, wanted).modules)


def test_layers_of_transformers_are_blocks() -> None:
    assert names(LanguageModel(width=8, depth=3, heads=2)) == ["blocks.0", "blocks.1", "blocks.2"]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 2, enable_nested_tensor=False)
    assert names(nn.ModuleDict({"encoder": encoder})) == ["encoder.layers.0", "encoder.layers.1"]


def test_a_sequential_stage_makes_way_for_its_blocks_and_another_does_not() -> None:
    stages = nn.Sequential(*(nn.Sequential(Residual(), Residual()) for _ in range(2)))
    assert names(stages) == ["0.0", "0.1", "1.0", "1.1"]
    assert names(nn.ModuleList([Stage(), Stage()])) == ["0", "1"]


def test_single_modules_and_bare_operations_are_none() -> None:
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), Residual())) == []


def test_blocks_of_any_place_can_be_named_by_module_or_class() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Stage(), Residual())
    assert names(model, ["2", "1.blocks.0"]) == ["1.blocks.0", "2"]
    assert names(model, ["Residual"]) == names(model, [Residual]) == ["1.blocks.0", "1.blocks.1", "2"]


def test_a_name_that_fits_nothing_is_told_the_classes() -> None:
    with pytest.raises(ValueError, match=r"'Block' is neither .*; the classes are Dropout, GELU, LayerNorm, Linear, "):
        find_blocks(nn.Sequential(Residual()), ["Block"])


def test_a_block_in_a_block_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'0\.blocks\.0' lies in '0'"):
        find_blocks(nn.Sequential(Stage()), ["Stage", "0.blocks.0"])


def test_a_module_with_two_names_is_one_block() -> None:
    block = Residual()
    assert names(nn.Sequential(block, Residual(), block)) == ["0", "1"]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_and_scripted_blocks_are_refused_with_the_reason() -> None:
    model = nn.Sequential(*(Residual() for _ in range(4)))
    model[1].compile(backend="eager")
    model[2] = torch.compile(model[2], backend="eager")
    model[3] = torch.jit.script(model[3])
    blocks = find_blocks(model, ["0", "1", "2", "3"])
    assert list(blocks.modules) == ["0"]
    assert blocks.refused == {
        "1": "1 is compiled, and the compiler plans what is saved",
        "2": "2 is compiled, and the compiler plans what is saved",
        "3": "it is a TorchScript module",
    }
    model.compile(backend="eager")
    assert find_blocks(model, ["0"]).refused == {"0": "the model is compiled, and the compiler plans what is saved"}
