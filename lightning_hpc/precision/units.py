"""The parts of a model whose precision is switched: its repeated blocks, and what lies beside them."""

from collections.abc import Iterable, Iterator

from torch import nn
from torchmetrics import Metric

from lightning_hpc.memory.blocks import Blocks, find_blocks, without_compiled


def find_units(model: nn.Module, wanted: Iterable[str | type[nn.Module]] | None = None) -> Blocks:
    """Finds the units of a model, none inside another, in the order of the model.

    A unit is a module whose forward runs in one precision and returns float32. Whole blocks and not single layers,
    since between the layers of a block activations stay in low precision; a single linear layer would save a cast of
    its input beside the input itself.

    Args:
        model: The model. It is not a unit itself.
        wanted: Names of modules or of classes, or classes. None means the repeated blocks (see
            `lightning_hpc.memory.find_blocks`) and, where there are none, each child of the model; where a child holds
            blocks, its other children are units too. Modules without parameters and metrics are none.

    Raises:
        ValueError: If a name fits nothing, or if a unit lies in another one.
    """
    found = find_blocks(model, wanted)
    if wanted is not None:
        return found
    beside = without_compiled(model, dict(_beside(model, "", {*found.modules, *found.refused})))
    modules = {**found.modules, **beside.modules}
    ordered = {name: module for name, module in model.named_modules() if name in modules}
    return Blocks(ordered, {**found.refused, **beside.refused})


def _beside(module: nn.Module, prefix: str, blocks: set[str]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = prefix + name
        if path in blocks or isinstance(child, Metric) or next(child.parameters(), None) is None:
            continue
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) or any(block.startswith(f"{path}.") for block in blocks):
            yield from _beside(child, f"{path}.", blocks)
        else:
            yield path, child
