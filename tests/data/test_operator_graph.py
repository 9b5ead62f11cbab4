"""The graph against a sequential execution by hand, with and without threads; plans, skipped steps, faults."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import add, neg
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_hpc.data.operator_graph import OperatorGraph
from lightning_hpc.data.operators import OperatorHints, operator
from lightning_hpc.data.seeding import seed_all

HEAVY = OperatorHints("high")


def combine(*values: int, salt: int) -> int:
    return hash((salt, *values))


def draw(*values: int, salt: int) -> int:
    drawn = (random.random(), float(np.random.random()), float(torch.rand(())))
    return hash((salt, drawn, *values))


def is_odd(value: int) -> bool:
    return bool(value % 2)


@dataclass(frozen=True)
class Recipe:
    """What a graph is built from; also executed by hand."""

    function: Callable[..., Any]
    inputs: tuple[str, ...]
    output: str
    when: str | None
    hints: OperatorHints


def random_recipes(rng: random.Random, kinds: tuple[str, ...] = ("plain", "plain", "condition")) -> list[Recipe]:
    names, recipes = ["a", "b", "train"], []
    for number in range(rng.randrange(1, 16)):
        kind = rng.choice(kinds)
        function: Callable[..., Any] = is_odd
        inputs: tuple[str, ...] = (rng.choice(names),)
        if kind != "condition":
            function = partial(draw if kind == "random" else combine, salt=number)
            inputs = tuple(rng.choices(names, k=rng.randrange(4)))
        when = rng.choice(names) if rng.random() < 0.4 else None
        hints = OperatorHints(rng.choice(["low", "high", "high"]), random=kind == "random")
        recipes.append(Recipe(function, inputs, f"n{number}", when, hints))
        names.append(f"n{number}")
    return recipes


def by_hand(recipes: list[Recipe], data: dict[str, Any]) -> dict[str, Any]:
    values = dict(data)
    skipped: set[str] = set()
    for recipe in recipes:
        needs = {*recipe.inputs} | ({recipe.when} if recipe.when else set())
        if needs & skipped or (recipe.when and not values[recipe.when]):
            skipped.add(recipe.output)
        else:
            values[recipe.output] = recipe.function(*(values[name] for name in recipe.inputs))
    return values


def build(recipes: list[Recipe], outputs: list[str] | None = None, threads: int = 1) -> OperatorGraph:
    graph = OperatorGraph(outputs, threads=threads)
    for each in recipes:
        graph.add(each.function, inputs=each.inputs, output=each.output, when=each.when, hints=each.hints)
    return graph


def samples(count: int) -> list[dict[str, Any]]:
    return [{"a": 3 * i, "b": 7 * i + 1, "train": i % 3 > 0, "index": i} for i in range(count)]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_random_graphs_give_what_steps_one_after_the_other_give(threads: int) -> None:
    for case in range(150):
        recipes = random_recipes(random.Random(case), ("plain", "plain", "condition", "random"))
        graph = build(recipes, threads=threads)
        for seed, sample in enumerate(samples(4)):
            before = dict(sample)
            seed_all(seed)
            expected = by_hand(recipes, sample)
            drawn_after = random.random(), np.random.random(), torch.rand(())
            seed_all(seed)
            result = graph(sample)
            assert list(result.items()) == list(expected.items())  # in this order too: collation keeps it
            assert (random.random(), np.random.random(), torch.rand(())) == drawn_after
            assert sample == before


def test_the_two_parts_of_a_split_do_what_the_whole_does() -> None:
    for case in range(200):
        rng = random.Random(case)
        recipes = random_recipes(rng)
        last: set[str] = set()
        for each in recipes:
            if last.intersection((*each.inputs, each.when)) or rng.random() < 0.3:
                last.add(each.output)
        everything = ["a", *(each.output for each in recipes)]
        for outputs in (None, rng.sample(everything, rng.randrange(1, len(everything) + 1))):
            first, second = build(recipes, outputs, threads=2).split(last)
            assert [step.output for step in second.steps] == [each.output for each in recipes if each.output in last]
            for sample in samples(4):
                expected = by_hand(recipes, sample)
                if outputs is not None:
                    expected = {name: expected[name] for name in outputs if name in expected}
                assert second(first(sample)) == expected


def test_the_example_of_the_docstring_and_a_skipped_step_with_its_dependants() -> None:
    graph = OperatorGraph(outputs=("x", "label", "size"))
    image = graph.add(lambda jpg: np.frombuffer(jpg, np.uint8), inputs="jpg", output="image")
    graph.add(len, inputs=image, output="size")
    graph.add(lambda image: image[::-1], inputs=image, output="flipped", when="train")
    graph.add(lambda flipped, label: (int(flipped[0]), label), inputs=("flipped", "label"), output="x")
    assert image == "image"
    assert graph({"jpg": b"\1\2", "label": 3, "train": True}) == {"x": (2, 3), "label": 3, "size": 2}
    assert graph({"jpg": b"\1\2", "label": 3, "train": False}) == {"label": 3, "size": 2}


def test_a_plan_is_made_once_for_each_structure_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make_plan = OperatorGraph._make_plan

    def count(graph: OperatorGraph, data: dict[str, Any]) -> Any:
        made.append(data)
        return make_plan(graph, data)

    monkeypatch.setattr(OperatorGraph, "_make_plan", count)
    graph = OperatorGraph()
    graph.add(abs, inputs="a", output="b", when="train")
    graph.add(abs, inputs="b", output="c")
    for value in (1, -2.0, np.int64(-3)):
        assert graph({"a": value, "train": True, "index": 1})["c"] == abs(value)
    assert graph({"a": -1, "train": False}) == {"a": -1, "train": False}
    assert len(made) == 1
    _, second = graph.split(["c"])
    assert second({"b": -5})["c"] == 5
    assert second({"a": 1}) == {"a": 1}  # what the first part skipped
    assert second({"b": -6})["c"] == 6
    assert len(made) == 3


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: g.add(abs, inputs="a", output="a"), ValueError, r"abs\(a\) takes 'a' before .* use another name"),
        (
            lambda g: g.add(abs, inputs="a", output="b"),
            ValueError,
            r"step 'b' = abs\(a\) makes what step 'b' = .* makes",
        ),
        (lambda g: g.add(abs, inputs="b", output="z"), ValueError, r"step 'c' = abs\(z\) takes 'z' before step 'z'"),
        (lambda g: g.add(None, inputs="a", output="d"), TypeError, "step 'd' needs something to call, got None"),
        (lambda g: g.add(abs, inputs="a", output="d", when=abs), TypeError, "must be the name of a value; a condition"),
        (lambda g: g({"a": 1}), ValueError, r"takes 'z', but the data and the steps before have \['a', 'b'\]"),
        (lambda g: g({"a": 1, "z": 1, "b": 2}), ValueError, "step 'b' = .* makes what the data has already"),
        (lambda g: g((1, 2)), TypeError, "takes values by name, such as .*, got <class 'tuple'>"),
        (lambda g: g.split(["x"]), ValueError, r"no step makes \['x'\]; there are \['b', 'c'\]"),
        (lambda g: (g({"a": 1, "z": 1}), g.add(abs, inputs="a", output="d")), RuntimeError, "add all steps before"),
        (lambda g: OperatorGraph("x"), TypeError, r"outputs='x' must be names, such as \('x',\)"),
        (lambda g: OperatorGraph(threads=0), ValueError, "threads=0 must be at least 1"),
    ],
)
def test_faults_name_the_steps_and_a_way_out(
    call: Callable[[OperatorGraph], Any], error: type[Exception], message: str
) -> None:
    graph = OperatorGraph()
    graph.add(abs, inputs="a", output="b")
    graph.add(abs, inputs="z", output="c")
    with pytest.raises(error, match=message):
        call(graph)


def test_a_misspelt_name_is_recognised_in_an_input_and_in_the_outputs() -> None:
    for outputs in (["imgae"], ["y"]):
        graph = OperatorGraph(outputs)
        graph.add(abs, inputs="imgae" if outputs == ["y"] else "image", output="y")
        with pytest.raises(ValueError, match=r"takes 'imgae', .* did you mean 'image'\?"):
            graph({"image": 1, "label": 2})


def test_a_condition_of_a_step_on_the_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"when='train', but on a device .* use torch.where"):
        OperatorGraph().add(abs, inputs="a", output="b", when="train", hints=OperatorHints(runs_on="device"))


def test_a_split_that_would_go_back_is_refused() -> None:
    graph = OperatorGraph()
    graph.add(abs, inputs="a", output="b")
    graph.add(abs, inputs="b", output="c")
    with pytest.raises(ValueError, match=r"step 'c' = abs\(b\) takes a value of the second part"):
        graph.split(["b"])


def test_heavy_branches_run_at_once_and_light_or_random_ones_in_the_calling_thread() -> None:
    meeting = threading.Barrier(2, timeout=20)
    met_in: dict[str, int] = {}
    is_armed = False

    def meet(_: int, name: str) -> None:
        met_in[name] = threading.get_ident()
        if is_armed:
            meeting.wait()

    def here(_: int) -> bool:
        return threading.get_ident() == caller

    caller = threading.get_ident()
    for extra in (True, False):
        graph = OperatorGraph(threads=3 if extra else 2)
        for name in ("left", "right"):
            graph.add(partial(meet, name=name), inputs="a", output=name, hints=HEAVY)
        graph.add(here, inputs="a", output="light")
        if extra:
            graph.add(here, inputs="a", output="random", hints=OperatorHints("high", random=True))
        is_armed = False
        graph({"a": 1})
        assert set(met_in.values()) == {caller}  # the first call looks for unannounced draws
        is_armed = True
        values = graph({"a": 1})
        assert met_in["left"] != met_in["right"]
        assert (caller in met_in.values()) is not extra  # it takes a heavy step unless it has a random one
        assert values["light"]
        assert values.get("random", True)


@pytest.mark.parametrize("generator", [random.random, np.random.random, partial(torch.rand, 1)])
def test_threads_refuse_an_operator_that_draws_unannounced(generator: Callable[[], Any]) -> None:
    graph = OperatorGraph(threads=2)
    graph.add(lambda a: generator(), inputs="a", output="b", hints=HEAVY)
    graph.add(abs, inputs="a", output="c", hints=HEAVY)
    with pytest.raises(ValueError, match=r"step 'b' = .* draws random numbers, .* hint random=True"):
        graph({"a": 1})


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_threads_take_over_the_modes_of_the_calling_one(mode: Callable[[], Any]) -> None:
    graph = OperatorGraph(threads=3)
    for number in range(3):
        graph.add(nn.Linear(2, 2), inputs="a", output=f"{number}", hints=HEAVY)
    with mode():
        for _ in range(2):
            made: list[Tensor] = [value for name, value in graph({"a": torch.ones(2)}).items() if name != "a"]
            expected = nn.Linear(2, 2)(torch.ones(2))
            assert {(each.requires_grad, each.is_inference()) for each in made} == {
                (expected.requires_grad, expected.is_inference())
            }


@pytest.mark.parametrize("failing", ["0", "1", "2"])
def test_an_error_comes_through_in_its_type_after_all_threads_are_done(failing: str) -> None:
    done: list[str] = []
    armed = False

    def work(_: int, name: str) -> None:
        if name == failing and armed:
            raise KeyError(name)
        done.append(name)

    graph = OperatorGraph(threads=3)
    for number in range(3):
        graph.add(partial(work, name=f"{number}"), inputs="a", output=f"{number}", hints=HEAVY)
    graph({"a": 1})
    done.clear()
    armed = True
    with pytest.raises(KeyError) as info:
        graph({"a": 1})
    assert sorted(done) == sorted({"0", "1", "2"} - {failing})
    assert getattr(info.value, "__notes__", [f"in step '{failing}' = partial(a)"]) == [
        f"in step '{failing}' = partial(a)"
    ]


@operator(compute="high")
def test_measure_tells_the_slow_step_and_leaves_generators_and_plans_alone() -> None:
    drawn, waits = [], []
    graph = OperatorGraph()
    graph.add(lambda a: sum(range(300_000)), inputs="a", output="slow")
    graph.add(lambda a: drawn.append(torch.rand(1)), inputs="a", output="random")
    graph.add(abs, inputs="a", output="skipped", when="train")
    graph.add(abs, inputs="skipped", output="too")
    before = torch.get_rng_state()
    seconds = graph.measure({"a": 1, "train": False}, repeats=3, synchronize=lambda: waits.append(1))
    assert list(seconds) == ["slow", "random", "skipped", "too"]
    assert seconds["slow"] > 10 * seconds["too"] > 0
    assert len(drawn) == 4
    assert len(waits) == 4 * 4 * 2  # before and after each step
    assert torch.equal(before, torch.get_rng_state())
    graph.add(abs, inputs="a", output="later")
    _, second = graph.split(["too"])
    assert second.measure({"a": 1}) == {"too": 0.0}


def test_a_bound_value_is_there_for_steps_and_conditions_but_not_in_the_result() -> None:
    graph = OperatorGraph()
    graph.add(neg, inputs="a", output="b", when="training")
    assert graph.bind(training=True)({"a": 1}) == {"a": 1, "b": -1}
    assert graph.bind(training=False)({"a": 1, "training": True}) == {"a": 1, "training": True}
    assert OperatorGraph(outputs=("scale",)).bind(scale=2).bind(other=3)({}) == {"scale": 2}
    with pytest.raises(ValueError, match=r"step 'b' = neg\(a\) makes 'b', which cannot be given a value as well"):
        graph.bind(b=1)


def test_both_parts_of_a_graph_find_its_bound_values() -> None:
    graph = OperatorGraph(outputs=("c",))
    graph.add(add, inputs=("a", "k"), output="b")
    graph.add(add, inputs=("b", "k"), output="c")
    first, second = graph.bind(k=10).split(["c"])
    assert first({"a": 1}) == {"b": 11}
    assert second({"b": 11}) == {"c": 21}


def test_modules_are_copied_to_a_device_and_stay_where_they_were() -> None:
    layer = torch.nn.Linear(2, 2)
    graph = OperatorGraph(outputs=("y",))
    graph.add(layer, inputs="x", output="h")
    graph.add(add, inputs=("h", "k"), output="y")
    moved = graph.bind(k=1).to(torch.device("meta"))
    assert moved({"x": torch.ones(1, 2, device="meta")})["y"].device.type == "meta"
    assert layer.weight.device.type == "cpu"
