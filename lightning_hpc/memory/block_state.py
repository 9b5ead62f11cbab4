"""What a block's forward changes in the block itself, so that a recomputation can start from what was there."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_MISSING = object()
_CONTAINERS = frozenset({"_parameters", "_buffers", "_modules"})
_MUTATORS = nn.modules.batchnorm._NormBase


class BlockState:
    """Buffers and attributes of some modules before a forward.

    Handles buffers that are changed in place (as the running statistics of batch normalisation) or replaced, and
    attributes that are set. A list that an attribute holds and that forward appends to is not seen.

    Args:
        modules: The modules that forward may change.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._before = [(module, _attributes(module), dict(module._buffers), _copies(module)) for module in modules]
        self._replaced: list[_Change] = []
        self._written: list[tuple[nn.Module, str, Tensor]] = []

    def find_changes(self) -> set[nn.Module]:
        """Keeps what forward has changed, and forgets the rest.

        Returns:
            The modules that it has changed.
        """
        for module, attributes, buffers, copies in self._before:
            after = _attributes(module)
            self._replaced += [
                (module, name, attributes.get(name, _MISSING))
                for name in {**attributes, **after}
                if attributes.get(name, _MISSING) is not after.get(name, _MISSING)
            ]
            written = {
                name
                for name, (buffer, version, _) in copies.items()
                if may_change(module) or buffer._version != version
            }
            self._written += [(module, name, copies[name][2]) for name in written]
            replaced = {name for name, buffer in buffers.items() if buffer is not module._buffers.get(name)} - written
            self._replaced += [(module, name, buffers[name]) for name in replaced]
        self._before.clear()
        return {module for module, _, _ in self._replaced + self._written}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The modules as they were before forward; they become what they are now when the context is left."""
        now = [(module, name, _get(module, name)) for module, name, _ in self._replaced + self._written]
        # The copies are for the next time, if backward comes again: this one will be written to.
        _set(self._replaced + [(module, name, copy.clone()) for module, name, copy in self._written])
        try:
            yield
        finally:
            _set(now)


_Change = tuple[nn.Module, str, Any]


def may_change(module: nn.Module) -> bool:
    """Whether forward may change a module of this kind unseen: its operations do not count as changes in place."""
    return isinstance(module, _MUTATORS)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _CONTAINERS}


def _copies(module: nn.Module) -> dict[str, tuple[Tensor, int, Tensor]]:
    buffers = ((name, buffer) for name, buffer in module._buffers.items() if buffer is not None)
    return {name: (buffer, buffer._version, buffer.detach().clone()) for name, buffer in buffers}


def _get(module: nn.Module, name: str) -> Any:
    return module._buffers[name] if name in module._buffers else module.__dict__.get(name, _MISSING)


def _set(values: Iterable[_Change]) -> None:
    for module, name, value in values:
        # Without `__setattr__`: a buffer is exchanged, not written to, since autograd may have saved it.
        target: dict[str, Any] = module._buffers if name in module._buffers else module.__dict__
        if value is _MISSING:
            target.pop(name, None)
        else:
            target[name] = value
