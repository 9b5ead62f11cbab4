"""Makes `pytorch_lightning.Trainer(strategy="hpc")` say what is wrong.

`pytorch_lightning` and `lightning.pytorch` are two packages with the same classes, and installing `lightning` brings
both. A Trainer of the first accepts nothing that was made for the second and, asked for ``"hpc"``, calls the name
invalid. So the name is registered there as well, with a factory that raises. `pytorch_lightning` takes seconds to
import, hence it is not imported here: the names are added when somebody else imports it.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, NoReturn

from typing_extensions import override

_MODULE = "pytorch_lightning.strategies"

MIXED_IMPORTS = (
    "lightning_hpc works with lightning.pytorch, and this Trainer comes from pytorch_lightning. These are two packages"
    " whose classes do not mix. Write `from lightning.pytorch import Trainer`, and import LightningModule and callbacks"
    " from lightning.pytorch too"
)
"""The message of every error that comes from mixing the two."""


def register_refusals(names: Iterable[str]) -> None:
    """Adds ``names`` to `pytorch_lightning`'s strategies, now or when it is imported; choosing one raises TypeError."""
    refused = tuple(names)
    if _MODULE in sys.modules:
        _register(sys.modules[_MODULE], refused)
    else:
        sys.meta_path.insert(0, _ImportWatcher(refused))


def _register(strategies: ModuleType, names: tuple[str, ...]) -> None:
    registry = strategies.StrategyRegistry
    for name in names:
        if name not in registry:
            registry.register(name, _refuse, description="Belongs to lightning.pytorch, not to pytorch_lightning")


def _refuse(**kwargs: Any) -> NoReturn:
    raise TypeError(MIXED_IMPORTS)


class _ImportWatcher(importlib.abc.MetaPathFinder):
    """Finds one module as everybody else would, and registers the names once it has been executed."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._run_after(spec.loader)
        return spec

    def _run_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _register(module, self._names)

        loader.exec_module = exec_module
