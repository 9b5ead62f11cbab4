"""One call of a checkpointed block: the forward now, and the same again in backward."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hpc.memory.block_state import BlockState
from lightning_hpc.memory.call_record import CallRecord
from lightning_hpc.memory.nested import flatten, unflatten


class BlockCall:
    """Runs ``forward``, and runs it again with the same inputs and the same state of the block whenever backward asks.

    Args:
        name: The block's name.
        forward: The block's forward without checkpointing.
        args: Arguments; tensors in tuples, lists and dicts are found.
        kwargs: Keyword arguments.
        watched: Modules of the block that forward may change.
        others: Modules of the block with buffers that forward does not change.
        may_change_inputs: Whether inputs are copied, in case that forward changes them in place.

    Attributes:
        changed_modules: After `run`: modules that forward has changed.
        changes_inputs: After `run`: whether forward has changed a tensor that it was given.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        watched: list[nn.Module],
        others: list[nn.Module],
        may_change_inputs: bool,
    ) -> None:
        self._name = name
        self._forward = forward
        self._leaves, self._structure = flatten((args, kwargs))
        self._watched = watched
        self._others = others
        self._copies_inputs = may_change_inputs
        self._versions: dict[int, int] = {}
        self._copied: set[int] = set()
        self._has_run = False
        self._state: BlockState | None = None
        self._record: CallRecord | None = None
        self.changed_modules: set[nn.Module] = set()
        self.changes_inputs = False

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]

    def run(self, record: CallRecord | None = None) -> Any:
        """What the block returns.

        Args:
            record: What notes the call, if it is measured.

        Raises:
            RuntimeError: If the block changes buffers that it has not changed so far.
        """
        self._record = record
        if record is not None:
            record.hold_inputs(self.tensors, self)
        # PyTorch keeps the random state of their devices. The inputs themselves stay here: it would refuse a block that
        # changes them.
        devices = {tensor.device: tensor for tensor in self.tensors}
        tokens = [tensor.detach().new_empty(0) for tensor in devices.values()]
        return checkpoint(self, *tokens, use_reentrant=False, preserve_rng_state=True)

    def __call__(self, *_: Tensor) -> Any:
        """Forward at first, recomputation later."""
        return self._run_again() if self._has_run else self._run_first()

    def _run_first(self) -> Any:
        self._has_run = True
        copies = {index: leaf.detach().clone() for index, leaf in self._indexed() if self._copies_inputs}
        before = {index: leaf._version for index, leaf in self._indexed()}
        others = self._versions_of_others()
        self._state = BlockState(self._watched)
        with nullcontext() if self._record is None else self._record.forward():
            outputs = self._apply()
        self.changed_modules = self._state.find_changes()
        if others != self._versions_of_others():
            raise RuntimeError(
                f"block {self._name!r} has begun to change a buffer in place that it did not change before, so it"
                " cannot be recomputed; leave it out of the blocks that may be checkpointed"
            )
        self._keep({index for index, leaf in self._indexed() if leaf._version != before[index]}, copies)
        return outputs

    def _keep(self, changed: set[int], copies: dict[int, Tensor]) -> None:
        """Puts copies in the place of inputs that forward has changed."""
        self.changes_inputs = bool(changed)
        self._copied = changed & copies.keys()
        for index in changed:
            leaf: Tensor = self._leaves[index]
            # It is an output of the block now, and would keep its own graph alive.
            self._leaves[index] = copies[index].requires_grad_(leaf.requires_grad) if index in copies else leaf.detach()
        self._versions = {
            index: leaf._version for index, leaf in self._indexed() if index not in changed - copies.keys()
        }

    def _run_again(self) -> Any:
        for index, leaf in self._indexed():
            if leaf._version != self._versions.get(index):
                raise RuntimeError(
                    f"an input of shape {tuple(leaf.shape)} of block {self._name!r} was changed in place, so the block"
                    " cannot be recomputed; leave it out of the blocks that may be checkpointed"
                )
        assert self._state is not None
        with self._state.restored(), nullcontext() if self._record is None else self._record.recomputation():
            return self._apply()

    def _apply(self) -> Any:
        # Autograd forbids to change a leaf in place, and backward may come again.
        leaves = [leaf.clone() if index in self._copied else leaf for index, leaf in enumerate(self._leaves)]
        args, kwargs = unflatten(leaves, self._structure)
        return self._forward(*args, **kwargs)

    def _versions_of_others(self) -> list[int]:
        return [buffer._version for module in self._others for buffer in module.buffers(recurse=False)]

    def _indexed(self) -> list[tuple[int, Tensor]]:
        return [(index, leaf) for index, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
