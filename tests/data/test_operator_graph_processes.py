"""A graph is copied, pickled and forked: each process has its own plans and threads."""

import copy
import os
import pickle

import pytest
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_hpc.data.operator_graph import OperatorGraph
from lightning_hpc.data.operators import operator
from tests.helpers import run_ranks


def square(x: int) -> int:
    return x * x


@operator(compute="high")
def cube(x: int) -> int:
    return x**3


def two_branches() -> OperatorGraph:
    graph = OperatorGraph(outputs=["s", "c"], threads=2)
    graph.add(square, inputs="x", output="s")
    graph.add(cube, inputs="x", output="c")
    graph.add(nn.Identity(), inputs="x", output="same")
    for _ in range(3):
        graph({"x": 2})
    return graph


def test_copies_work_and_can_be_extended() -> None:
    graph = two_branches()
    for other in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert [other({"x": x}) for x in (2, 3, 4)] == [{"s": x * x, "c": x**3} for x in (2, 3, 4)]
        assert other.steps[2].function is not graph.steps[2].function
    copy.deepcopy(graph).add(square, inputs="s", output="more")


def call_graph(rank: int, world_size: int, graph: OperatorGraph) -> list[dict[str, int]]:
    return [graph({"x": rank + i}) for i in range(3)]


def test_it_goes_to_another_process() -> None:
    assert run_ranks(call_graph, 1, two_branches(), init_gloo=False) == [[{"s": i * i, "c": i**3} for i in range(3)]]


class Squares(Dataset[dict[str, int]]):
    def __init__(self, graph: OperatorGraph) -> None:
        self.graph, self.pid = graph, os.getpid()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, int]:
        assert os.getpid() != self.pid
        return self.graph({"x": index})


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_worker_has_threads_of_its_own() -> None:
    dataset = Squares(two_branches())
    loader = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="fork", timeout=30)
    (batch,) = list(loader)
    assert batch["s"].tolist() == [0, 1, 4, 9]
    assert batch["c"].tolist() == [0, 1, 8, 27]
