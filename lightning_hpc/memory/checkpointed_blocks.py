"""`CheckpointedBlocks`: blocks of a model that are recomputed in backward, and can be turned on and off one by one."""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from typing_extensions import Self, override

from lightning_hpc.memory.block_call import BlockCall
from lightning_hpc.memory.block_state import may_change
from lightning_hpc.memory.call_record import CallRecord
from lightning_hpc.memory.replaced_forward import ReplacedForward
from lightning_hpc.memory.saved_activations import SavedActivations


class CheckpointedBlocks:
    """Checkpoints blocks of a model wherever autograd records; gradients stay bitwise the same.

    Only ``forward`` of each block is replaced, on the object: names, ``state_dict`` and types stay as they are. A deep
    copy of the model works by itself; a pickled one is plain. Random numbers, autocast, buffers (running statistics are
    updated once) and attributes are in the recomputation what they were in forward. Hooks of the block itself run
    once, those of modules in it run in the recomputation as well. A hook that enters a context there must be
    registered with ``always_call=True``, since a recomputation ends as soon as it has what backward needs.

    Args:
        blocks: The blocks by name; none may lie in another. All of them are checkpointed at first.

    Attributes:
        refused: Blocks that cannot be checkpointed, by name, with the reason; found when they first run.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self.refused: dict[str, str] = {}
        self._forwards = {name: _Forward(name, block, self.refused) for name, block in blocks.items()}

    @property
    def names(self) -> list[str]:
        """Of all blocks that can be checkpointed."""
        return [name for name in self._forwards if name not in self.refused]

    @property
    def checkpointed(self) -> list[str]:
        """Names of those that are."""
        return [name for name, forward in self._forwards.items() if forward.is_on]

    def checkpoint(self, names: Collection[str]) -> None:
        """Checkpoints these blocks and no others.

        Raises:
            ValueError: If one of them is not known, or cannot be checkpointed.
        """
        for name in names:
            if name not in self._forwards or name in self.refused:
                reason = self.refused.get(name, f"the blocks are {', '.join(self._forwards)}")
                raise ValueError(f"block {name!r} cannot be checkpointed: {reason}")
        for name, forward in self._forwards.items():
            forward.is_on = name in names

    @contextmanager
    def watched_by(self, recorder: SavedActivations) -> Iterator[list[CallRecord]]:
        """Has ``recorder`` see what recomputations save; without this, they are hidden from it.

        Returns:
            A list to which each call of a checkpointed block is added.
        """
        records: list[CallRecord] = []
        for forward in self._forwards.values():
            forward.listener = functools.partial(_add_record, records, recorder)
        try:
            yield records
        finally:
            for forward in self._forwards.values():
                forward.listener = None

    def remove(self) -> None:
        """Gives each block its own ``forward`` back."""
        for forward in self._forwards.values():
            forward.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def _add_record(records: list[CallRecord], recorder: SavedActivations, name: str, device: torch.device) -> CallRecord:
    records.append(CallRecord(recorder, name, device))
    return records[-1]


class _Forward(ReplacedForward):
    """Calls the block's own forward, as a checkpoint where it is on."""

    def __init__(self, name: str, block: nn.Module, refused: dict[str, str]) -> None:
        super().__init__(block)
        self.is_on = True
        self.listener: Callable[[str, torch.device], CallRecord] | None = None
        self._name = name
        self._refused = refused
        # Names, so that they can be found in a copy of the block too; none before the first call.
        self._watched: list[str] | None = None
        self._others: list[str] = []

    @override
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        block = module
        forward = self._own_forward(block)
        if not self.is_on or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        is_first = self._watched is None
        watched = list(block.modules()) if self._watched is None else _get(block, self._watched)
        others = _get(block, self._others)
        call = BlockCall(self._name, forward, args, kwargs, watched, others, may_change_inputs=is_first)
        outputs = call.run(self._start_record(block, call))
        if is_first:
            self._learn(block, call)
        return outputs

    @override
    def remove(self) -> None:
        self.is_on = False  # a copy of the block, or what has replaced `forward` since, may still call this
        super().remove()

    def _learn(self, block: nn.Module, call: BlockCall) -> None:
        modules = dict(block.named_modules())
        self._watched = [
            name for name, module in modules.items() if module in call.changed_modules or may_change(module)
        ]
        self._others = [name for name, module in modules.items() if module._buffers and name not in self._watched]
        if call.changes_inputs:
            self.is_on = False
            self._refused[self._name] = "it changes its input in place"

    def _start_record(self, block: nn.Module, call: BlockCall) -> CallRecord | None:
        if self.listener is None:
            return None
        tensors = [*call.tensors, *block.parameters()]
        return self.listener(self._name, tensors[0].device if tensors else torch.device("cpu"))


def _get(block: nn.Module, names: list[str]) -> list[nn.Module]:
    return [block.get_submodule(name) for name in names]
