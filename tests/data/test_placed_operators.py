"""An operator graph at work: its load is measured, and its steps move where that pays."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_hpc.data.operator_graph import OperatorGraph
from lightning_hpc.data.operators import OperatorHints
from lightning_hpc.data.placed_operators import PlacedOperators, measure_load

CPU = torch.device("cpu")
ANY, WORKER, DEVICE = (OperatorHints(runs_on=side) for side in ("any", "worker", "device"))


class Vectors(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((3,), float(index))}


def slow_on_samples(x: Tensor) -> Tensor:
    """Takes 20 ms of a sample, and next to nothing of a batch."""
    if x.dim() == 1:
        time.sleep(0.02)
    return x + 1


def make_graph(middle: Callable[..., Any] = slow_on_samples) -> OperatorGraph:
    graph = OperatorGraph(outputs=("z",))
    graph.add(torch.neg, inputs="x", output="w", hints=WORKER)
    graph.add(middle, inputs="w", output="y", hints=ANY)
    graph.add(torch.neg, inputs="y", output="z", hints=DEVICE)
    return graph


def train(operators: PlacedOperators, batches: int = 3) -> None:
    """Waits a hundredth of a second for each batch, and is hardly busy with it."""
    next_batch = operators.timed(lambda: time.sleep(0.01))
    for _ in range(batches):
        next_batch()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_step_is_measured_where_it_can_run(num_workers: int) -> None:
    loader = DataLoader(Vectors(), batch_size=4, num_workers=num_workers)
    before = torch.get_rng_state()
    load = measure_load(make_graph(), loader, device=CPU, waiting_s=0.5, training_s=0.1)
    assert load.worker_s.keys() == {"w", "y"}
    assert load.device_s.keys() == {"y", "z"}
    assert load.worker_s["y"] > 0.019
    assert (load.batch_size, load.num_workers, load.waiting_s, load.data_bytes) == (4, num_workers, 0.5, {"x": 12.0})
    assert torch.equal(before, torch.get_rng_state())


def test_a_step_moves_to_a_device_that_waits_for_it_and_the_result_stays() -> None:
    operators = PlacedOperators(make_graph(), has_device=True)
    loader = DataLoader(Vectors(), batch_size=4)
    assert operators.placement.on_device == {"z"}
    before = apply(operators)
    train(operators)
    assert operators.review(loader)
    assert operators.placement.on_device == {"y", "z"}
    assert "measured" in operators.placement.reason
    assert torch.equal(before, apply(operators))
    train(operators)
    assert not operators.review(loader)  # where it is best


def apply(operators: PlacedOperators) -> Tensor:
    samples = [operators.placement.worker(Vectors()[index]) for index in range(4)]
    found: Tensor = operators(default_collate(samples))["z"]
    return found


@pytest.mark.parametrize(
    ("graph", "has_device", "batches"),
    [
        pytest.param(make_graph(), False, 3, id="no device"),
        pytest.param(make_graph(), True, 1, id="no step yet"),
        pytest.param(OperatorGraph(), True, 3, id="nothing to choose"),
    ],
)
def test_nothing_is_measured_where_nothing_can_move(graph: OperatorGraph, has_device: bool, batches: int) -> None:
    operators = PlacedOperators(graph, has_device=has_device)
    train(operators, batches)
    assert not operators.review(DataLoader([]))  # which has nothing to read


def test_waiting_is_told_from_training() -> None:
    operators = PlacedOperators(make_graph(), has_device=True)
    next_batch = operators.timed(lambda: time.sleep(0.01))
    for _ in range(3):
        next_batch()
        time.sleep(0.03)
    assert len(operators._notes) == 2
    for waited, trained in operators._notes:
        assert waited >= 0.01
        assert trained >= 0.03


def test_modules_go_to_the_device_with_the_steps_that_run_there() -> None:
    layer, last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    graph = OperatorGraph(outputs=("y",))
    graph.add(layer, inputs="x", output="y", hints=DEVICE)
    operators = PlacedOperators(graph, lambda batch: last(batch["y"]), has_device=True)
    assert torch.equal(operators({"x": torch.ones(2, 3)}), last(layer(torch.ones(2, 3))))
    operators = PlacedOperators(graph, torch.nn.Identity(), has_device=True)
    operators.to(torch.device("meta"))
    assert operators({"x": torch.ones(2, 3, device="meta")})["y"].device.type == "meta"
    assert layer.weight.device.type == "cpu"
