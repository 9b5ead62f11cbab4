"""`default_collate`, value for value, with tensors stacked where the batch is to lie and nothing in ``/dev/shm``."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.collate import default_collate_fn_map

from lightning_hpc.data.collating import SlotCollate, spare_shared_memory
from lightning_hpc.data.packing import SlotWriter
from tests.data.datasets import Nested, assert_same
from tests.data.test_packing import Tagged


def new_collate(capacity: int = 2**20) -> tuple[SlotCollate, SlotWriter]:
    writer = SlotWriter(torch.zeros(2**21, dtype=torch.uint8))
    writer.open(4096, capacity)
    return SlotCollate(writer), writer


SAMPLES: dict[str, list[Any]] = {
    "nested": [Nested(9)[index] for index in range(9)],
    "arrays": [np.full((30, 20), index, np.float16) for index in range(3)],
    "numbers": [1, 2, 3],
    "floats": [0.5, 1.5],
    "scalars": [np.float32(1), np.float32(2)],
    "text": ["a", "b"],
    "one sample": [torch.randn(40, 50)],
    "with gaps": [torch.randn(40, 50)[:, ::2] for _ in range(3)],
    "channels last": [torch.randn(20, 30, 3).permute(2, 0, 1) for _ in range(3)],
    "conjugated": [torch.randn(3000, dtype=torch.complex64).conj() for _ in range(2)],
    "empty": [torch.empty(0, 2), torch.empty(0, 2)],
    "several dtypes": [torch.ones(3), torch.ones(3, dtype=torch.float64)],
    "requires_grad": [torch.ones(3), torch.ones(3, requires_grad=True)],
    "subclass": [torch.randn(3000).as_subclass(Tagged) for _ in range(2)],
}

REFUSED: dict[str, list[Any]] = {
    "unequal": [torch.ones(3), torch.ones(4)],
    "unequal lists": [[1, 2], [1]],
    "sparse": [torch.eye(3).to_sparse()] * 2,
    "nested": [torch.nested.nested_tensor([torch.ones(3)], layout=torch.jagged)] * 2,
    "None": [None, None],
    "objects": [np.array([None, 1]), np.array([None, 2])],
}


@pytest.mark.parametrize("capacity", [2**20, 1000])
@pytest.mark.parametrize("samples", SAMPLES.values(), ids=SAMPLES)
def test_the_same_as_default_collate_whether_it_fits_or_not(samples: list[Any], capacity: int) -> None:
    assert_same(new_collate(capacity)[0](samples), default_collate(samples))


@pytest.mark.parametrize("samples", REFUSED.values(), ids=REFUSED)
def test_the_same_error_as_default_collate(samples: list[Any]) -> None:
    with pytest.raises((RuntimeError, TypeError)) as expected:
        default_collate(samples)
    with pytest.raises(expected.type) as caught:
        new_collate()[0](samples)
    assert str(caught.value) == str(expected.value)


def test_tensors_and_arrays_are_stacked_in_the_slot_at_aligned_places() -> None:
    collate, writer = new_collate()
    batch = collate([{"a": torch.ones(7, dtype=torch.uint8), "b": np.ones((100, 3))} for _ in range(3)])
    offsets = [writer.offset_of(batch["a"]), writer.offset_of(batch["b"])]
    assert offsets == [0, 64]
    used = writer.used
    writer.pack(batch)
    assert writer.used == used


def test_what_does_not_fit_is_counted() -> None:
    collate, writer = new_collate(capacity=1000)
    batch = collate([torch.ones(100), torch.ones(100)]), collate([torch.ones(100), torch.ones(100)])
    assert writer.offset_of(batch[0]) == 0
    assert writer.offset_of(batch[1]) is None
    assert writer.used > 1000


def test_a_collate_function_that_the_user_has_put_into_the_map_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, Tensor, lambda samples, *, collate_fn_map=None: "mine")
    assert new_collate()[0]([torch.ones(3)]) == "mine"
    spare_shared_memory()
    assert default_collate([torch.ones(3)]) == "mine"


@pytest.mark.parametrize("collate", [default_collate, new_collate(100)[0]], ids=["default_collate", "SlotCollate"])
def test_a_worker_makes_no_files_in_shared_memory(
    collate: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(default_collate_fn_map, Tensor, default_collate_fn_map[Tensor])  # restores it afterwards
    monkeypatch.setattr(torch_worker, "_worker_info", "in a worker")
    spare_shared_memory()
    samples: list[Tensor] = [torch.randn(3000).as_subclass(Tagged) for _ in range(2)]
    batch = collate(samples)
    assert not batch.is_shared()
    assert_same(batch, torch.stack(samples))
    assert not collate([torch.randn(3000), torch.randn(3000)]).is_shared()
