"""A loader with an operator graph: the same batches for any number of workers, and steps that move between epochs."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_hpc.data import OperatorGraph, OperatorHints, SharedMemoryDataModule, SharedMemoryLoader
from lightning_hpc.data.placed_operators import PlacedOperators
from tests.data.datasets import Parts

ANY, DEVICE = (OperatorHints(runs_on=side) for side in ("any", "device"))


class Vectors(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((3,), float(index))}


def jitter(x: Tensor) -> Tensor:
    return x + random.random() + torch.rand(())


def make_graph() -> OperatorGraph:
    graph = OperatorGraph(outputs=("x", "z"))
    graph.add(jitter, inputs="x", output="y", hints=OperatorHints(random=True))
    graph.add(torch.neg, inputs="y", output="w", hints=ANY)
    graph.add(lambda w: w.sum(0, keepdim=True), inputs="w", output="z", hints=DEVICE)
    return graph


def read(num_workers: int, **kwargs: Any) -> list[dict[str, Tensor]]:
    torch.manual_seed(3)
    loader = SharedMemoryLoader(Vectors(), 2, num_workers=num_workers, operators=make_graph(), **kwargs)
    try:
        return [batch for _ in range(2) for batch in loader]
    finally:
        loader.close()


def test_the_same_batches_for_any_number_of_workers() -> None:
    expected = read(0)
    assert [batch["z"].shape for batch in expected] == [(1, 3)] * 6  # the device's step has seen the whole batch
    assert [batch["x"][:, 0].tolist() for batch in expected] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]] * 2
    assert not torch.equal(expected[0]["z"], expected[3]["z"])  # another epoch
    for num_workers in (1, 2):
        for one, other in zip(expected, read(num_workers), strict=True):
            assert all(torch.equal(one[name], other[name]) for name in ("x", "z"))


def test_a_transform_of_the_batch_comes_last() -> None:
    plain, doubled = read(0), read(0, device_transform=lambda batch: batch["z"] * 2)
    assert all(torch.equal(2 * one["z"], other) for one, other in zip(plain, doubled, strict=True))


def test_samples_that_are_no_mappings_are_refused() -> None:
    for num_workers in (0, 1):
        loader = SharedMemoryLoader(Parts(4), 2, num_workers=num_workers, operators=make_graph())
        with pytest.raises(TypeError, match="an OperatorGraph takes values by name"):
            next(iter(loader))
        loader.close()


def test_workers_get_the_new_steps_where_steps_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [False, False, True]
    monkeypatch.setattr(PlacedOperators, "review", lambda self, loader: answers.pop(0))
    loader = SharedMemoryLoader(Vectors(), 2, num_workers=1, operators=make_graph())
    list(loader)
    assert loader._stream is not None
    first = loader._stream.pids
    pids = []
    for _ in range(2):
        assert len(list(loader)) == 3
        pids.append(loader._stream.pids)
    assert pids[0] == first
    assert pids[1] != first
    loader.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"operators": [jitter]}, r"operators=\[<function jitter .* must be an OperatorGraph"),
        ({"device_transform": "flip"}, "device_transform='flip' must be callable with a batch"),
    ],
)
def test_what_is_no_transform_is_refused(wrong: dict[str, Any], message: str) -> None:
    for make in (SharedMemoryLoader, SharedMemoryDataModule):
        with pytest.raises(TypeError, match=message):
            make(Vectors(), **wrong)


def test_a_device_that_is_not_there_is_named() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="device='cuda', but CUDA is not available here"):
            iter(SharedMemoryLoader(Vectors(), 2, device="cuda"))
