"""`ReplacedForward`: something that is called in the place of a module's ``forward``, and can be taken away again."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


class ReplacedForward(ABC):
    """Stands on a module as its ``forward``, bound to the module, so that a deep copy binds it to the copy.

    Names, ``state_dict``, types and hooks of the module stay as they are; a pickled module is plain.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._replaced = module.__dict__.get("forward")
        functools.update_wrapper(self, type(module).forward)
        self.__name__ = "forward"  # a pickled method is looked up by it, which finds the forward of the class
        self._method = MethodType(self, module)
        module.forward = self._method

    @abstractmethod
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Called in the place of forward, with the module itself, or a copy of it."""

    def remove(self) -> None:
        """Gives the module its own forward back, unless something else stands on it by now."""
        if self._module.__dict__.get("forward") is not self._method:
            return
        del self._module.forward
        if self._replaced is not None:
            self._module.forward = self._replaced

    def _own_forward(self, module: nn.Module) -> Callable[..., Any]:
        """What was replaced, bound to ``module``."""
        if self._replaced is None:
            return MethodType(type(module).forward, module)
        if isinstance(self._replaced, MethodType):
            return MethodType(self._replaced.__func__, module)
        return self._replaced  # type: ignore[no-any-return]
