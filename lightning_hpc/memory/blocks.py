"""Which parts of a model may be checkpointed: its repeated blocks, or those that the user names."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass(frozen=True)
class Blocks:
    """Blocks that may be checkpointed, none inside another.

    Attributes:
        modules: The blocks by their name in the model.
        refused: Others that were asked for or found, by name, with the reason why they cannot be.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def find_blocks(model: nn.Module, wanted: Iterable[str | type[nn.Module]] | None = None) -> Blocks:
    """Finds blocks, in the order of the model.

    By default these are the children of `nn.Sequential` and `nn.ModuleList` that have children themselves and of which
    at least two have the same class: layers of transformers, residual blocks. The outermost are taken, but a
    `nn.Sequential` that holds such blocks (a stage) makes way for them.

    Args:
        model: The model. Blocks in compiled modules are refused, since the compiler plans what is saved.
        wanted: Names of modules, as `nn.Module.named_modules` gives them, or classes, or names of classes.

    Raises:
        ValueError: If a name fits nothing, or if a block lies in another one.
    """
    found = _repeated(model, "") if wanted is None else _named(model, wanted)
    _require_apart(found)
    return without_compiled(model, found)


def without_compiled(model: nn.Module, found: Mapping[str, nn.Module]) -> Blocks:
    """Refuses those of the modules ``found`` in ``model`` whose forward cannot be replaced."""
    compiled = _compiled(model)
    blocks = Blocks()
    for name, module in found.items():
        inside = next((outer for outer in compiled if _is_in(name, outer)), None)
        if inside is not None:
            blocks.refused[name] = f"{inside or 'the model'} is compiled, and the compiler plans what is saved"
        elif isinstance(module, torch.jit.ScriptModule):
            blocks.refused[name] = "it is a TorchScript module"
        else:
            blocks.modules[name] = module
    return blocks


def _repeated(module: nn.Module, prefix: str) -> dict[str, nn.Module]:
    children = list(module.named_children())
    counts = Counter(type(child) for _, child in children if next(child.children(), None) is not None)
    holds_blocks = isinstance(module, (nn.Sequential, nn.ModuleList))
    found: dict[str, nn.Module] = {}
    for name, child in children:
        inner = _repeated(child, f"{prefix}{name}.")
        is_block = holds_blocks and counts[type(child)] > 1
        if is_block and not (isinstance(child, nn.Sequential) and inner):
            found[prefix + name] = child
        else:
            found |= inner
    return found


def _named(model: nn.Module, wanted: Iterable[str | type[nn.Module]]) -> dict[str, nn.Module]:
    modules = {name: module for name, module in model.named_modules() if name}
    chosen: set[str] = set()
    for want in wanted:
        fitting = {name for name, module in modules.items() if name == want or _is_of(module, want)}
        if not fitting:
            classes = sorted({type(module).__name__ for module in modules.values()})
            raise ValueError(
                f"blocks: {want!r} is neither the name of a module nor that of a class in the model; the classes are"
                f" {', '.join(classes)}"
            )
        chosen |= fitting
    return {name: module for name, module in modules.items() if name in chosen}


def _is_of(module: nn.Module, want: str | type[nn.Module]) -> bool:
    return type(module).__name__ == want if isinstance(want, str) else isinstance(module, want)


def _require_apart(found: dict[str, nn.Module]) -> None:
    for name in found:
        outer = next((other for other in found if other != name and _is_in(name, other)), None)
        if outer is not None:
            raise ValueError(
                f"blocks: {name!r} lies in {outer!r}, and would be recomputed twice; name only one of them"
            )


def _is_in(name: str, outer: str) -> bool:
    return outer == "" or name == outer or name.startswith(f"{outer}.")


def _compiled(model: nn.Module) -> list[str]:
    """Names of modules that `torch.compile` or `nn.Module.compile` has made faster."""
    return [
        name
        for name, module in model.named_modules()
        # The attribute is private, but nothing else tells that `nn.Module.compile` was called.
        if isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
    ]
