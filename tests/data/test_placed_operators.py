"""An operator graph at work: its load is measured, and its steps move where that pays."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from lightning_hpc.data.operator_graph import OperatorGraph
from lightning_hpc.data.operators import OperatorHints
from lightning_hpc.data.placed_operators import PlacedOperators, measure_load

ANY, WORKER, DEVICE = (OperatorHints(runs_on=side) for side in ("any", "worker", "device"))


def slow_on_samples(x: torch.Tensor) -> torch.Tensor:
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


def samples(count: int) -> Sequence[dict[str, torch.Tensor]]:
    return [{"x": torch.full((3,), float(number))} for number in range(count)]


CONDITIONS: dict[str, Any] = {
    "to_batch": default_collate,
    "synchronize": bool,
    "batch_size": 4,
    "num_workers": 1,
}


def test_each_step_is_measured_where_it_can_run() -> None:
    load = measure_load(make_graph(), samples, waiting_s=0.5, training_s=0.1, **CONDITIONS)
    assert load.worker_s.keys() == {"w", "y"}
    assert load.device_s.keys() == {"y", "z"}
    assert load.worker_s["y"] > 0.019
    assert (load.batch_size, load.waiting_s, load.data_bytes) == (4, 0.5, {"x": 12.0})


def test_a_step_moves_to_a_device_that_waits_for_it_and_the_result_stays() -> None:
    operators = PlacedOperators(make_graph(), has_device=True)
    assert operators.placement.on_device == {"z"}
    before = apply(operators)
    operators.note(waited_s=0.1, trained_s=0.001)
    assert operators.review(samples, **CONDITIONS)
    assert operators.placement.on_device == {"y", "z"}
    assert "measured" in operators.placement.reason
    assert torch.equal(before, apply(operators))
    operators.note(waited_s=0.1, trained_s=0.001)
    assert not operators.review(samples, **CONDITIONS)  # where it is best


def apply(operators: PlacedOperators) -> torch.Tensor:
    worker, device = operators.placement.worker, operators.placement.device
    assert device is not None
    found: torch.Tensor = device(default_collate([worker(sample) for sample in samples(4)]))["z"]
    return found


def refuse(count: int) -> Sequence[Any]:
    raise AssertionError(f"{count} samples were read for nothing")


@pytest.mark.parametrize(
    ("graph", "has_device", "is_noted"),
    [
        pytest.param(make_graph(), False, True, id="no device"),
        pytest.param(make_graph(), True, False, id="no batch yet"),
        pytest.param(OperatorGraph(), True, True, id="nothing to choose"),
    ],
)
def test_nothing_is_measured_where_nothing_can_move(graph: OperatorGraph, has_device: bool, is_noted: bool) -> None:
    operators = PlacedOperators(graph, has_device=has_device)
    if is_noted:
        operators.note(waited_s=1.0, trained_s=1.0)
    assert not operators.review(refuse, **CONDITIONS)


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
