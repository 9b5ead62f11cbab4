"""`default_collate` that stacks samples where the batch is to lie."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# The documented way to extend `default_collate`; it has no other address.
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

from lightning_hpc.data.packing import SlotWriter


class SlotCollate:
    """Collates as `torch.utils.data.default_collate`, with tensors and arrays stacked straight into a slot.

    Args:
        writer: The slot; `open` it before each batch.
    """

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer
        self._functions = dict(default_collate_fn_map)
        if self._functions[Tensor] in (collate_tensor_fn, _stack):  # else it is the user's own
            self._functions[Tensor] = self._stack

    def __call__(self, samples: Sequence[Any]) -> Any:
        """A batch of the samples."""
        return collate(samples, collate_fn_map=self._functions)

    def _stack(self, samples: Sequence[Tensor], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None) -> Any:
        first = samples[0]
        if first.numel() and all(type(sample) is Tensor and _is_like(sample, first) for sample in samples):
            place = self._writer.empty((len(samples), *first.shape), first.dtype)
            return torch.stack(tuple(samples), 0, out=place)
        # Whatever is unusual gets the usual treatment, errors included.
        return _stack(samples, collate_fn_map=collate_fn_map)


def spare_shared_memory() -> None:
    """Lets `default_collate` use ordinary memory in this worker, for custom functions that call it.

    It would make a file in ``/dev/shm`` for each tensor, which is slow and may not fit there (pytorch#58386).
    """
    if default_collate_fn_map[Tensor] is collate_tensor_fn:
        default_collate_fn_map[Tensor] = _stack


def _stack(samples: Sequence[Tensor], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None) -> Any:
    if samples[0].is_nested or samples[0].layout is not torch.strided:
        return collate_tensor_fn(samples, collate_fn_map=collate_fn_map)  # says why it does not
    return torch.stack(tuple(samples), 0)


def _is_like(sample: Tensor, first: Tensor) -> bool:
    return (
        sample.shape == first.shape
        and sample.dtype == first.dtype
        and sample.layout is torch.strided
        and sample.device.type == "cpu"
        and not (sample.requires_grad or sample.is_nested or sample.is_quantized)
    )
