"""Where steps run: what hints allow, what they prefer, and what measurements change."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from lightning_hpc.data.operator_graph import OperatorGraph
from lightning_hpc.data.operators import OperatorHints
from lightning_hpc.data.placement import Load, place, sides_of

WORKER, DEVICE, ANY = (OperatorHints(runs_on=side) for side in ("worker", "device", "any"))
RANDOM, HEAVY = replace(ANY, random=True), replace(ANY, compute="high")


def chain(*hints: OperatorHints | tuple[OperatorHints, str]) -> OperatorGraph:
    """``x -> 0 -> 1 -> ...``, with a condition where one is given."""
    graph = OperatorGraph(outputs=[f"{len(hints) - 1}"])
    for number, each in enumerate(hints):
        hint, when = each if isinstance(each, tuple) else (each, None)
        graph.add(torch.neg, inputs="x" if number == 0 else f"{number - 1}", output=f"{number}", when=when, hints=hint)
    return graph


def load(worker: list[float], device: list[float], **kwargs: Any) -> Load:
    """Of a chain: seconds of each step, 1 sample a batch, 1 worker; -1 for what was not measured."""
    figures = {"batch_size": 1, "num_workers": 1, "training_s": 1.0, "waiting_s": 9.0, **kwargs}
    by_name = [{f"{i}": s for i, s in enumerate(side) if s >= 0} for side in (worker, device)]
    return Load(by_name[0], by_name[1], **figures)


@pytest.mark.parametrize(
    ("hints", "worker", "either", "device"),
    [
        ([WORKER, WORKER], "01", "", ""),
        ([WORKER, ANY, ANY], "0", "12", ""),
        ([ANY, WORKER, ANY], "01", "2", ""),  # what a worker's step takes is made there
        ([WORKER, ANY, DEVICE], "0", "1", "2"),
        ([WORKER, DEVICE, ANY], "0", "", "12"),  # what takes a device's value runs there
        ([ANY, RANDOM, ANY], "01", "2", ""),  # samples have their own seed in a worker
        ([ANY, (ANY, "train"), ANY], "01", "2", ""),  # a batch has no condition
        ([DEVICE], "", "", "0"),
        ([replace(DEVICE, random=True)], "", "", "0"),
    ],
)
def test_sides(hints: list[Any], worker: str, either: str, device: str) -> None:
    sides = sides_of(chain(*hints))
    assert tuple(map("".join, (sides.worker, sides.either, sides.device))) == (worker, either, device)


@pytest.mark.parametrize(
    ("second", "reason"), [(WORKER, "runs_on='worker'"), (RANDOM, "random=True"), ((ANY, "train"), "when='train'")]
)
def test_a_worker_cannot_take_what_the_device_makes(second: Any, reason: str) -> None:
    message = rf"step '2' = neg\(1\) runs in a worker \({reason}\) but takes what step '1' = neg\(0\) makes on the dev"
    with pytest.raises(ValueError, match=message):
        place(chain(DEVICE, ANY, second), has_device=True)


def test_without_a_device_all_is_in_the_workers_but_what_needs_one() -> None:
    placement = place(chain(WORKER, HEAVY, ANY), has_device=False)
    assert (placement.device, placement.on_device) == (None, frozenset())
    assert placement.worker({"x": torch.ones(1)})["2"].item() == -1
    placement = place(chain(WORKER, HEAVY, DEVICE), has_device=False)
    assert placement.on_device == {"2"}
    assert placement.reason == "no device: '2' on the batch, all else in the workers"


@pytest.mark.parametrize(
    ("hints", "on_device", "reason"),
    [
        ([WORKER, WORKER], "", "the hints leave no choice"),
        ([WORKER, DEVICE], "1", "the hints leave no choice"),
        ([WORKER, ANY, ANY], "", "by hints: nothing on the device, as fewest bytes cross"),
        ([WORKER, ANY, HEAVY, ANY], "23", "by hints: '2', '3' on the device, as compute of '2' is more than low"),
        ([WORKER, replace(ANY, compute="medium")], "1", "by hints: '1' on the device, as compute of '1' is more"),
        # Four times as large after the step, so it is copied before; a quarter, so after.
        ([WORKER, replace(ANY, memory=4.0), ANY], "12", "by hints: '1', '2' on the device, as fewest bytes cross"),
        ([WORKER, replace(ANY, memory=0.25), ANY], "", "by hints: nothing on the device, as fewest bytes cross"),
        ([WORKER, replace(ANY, memory=4.0), replace(ANY, memory=0.1)], "", "by hints: nothing on the device"),
    ],
)
def test_placement_by_hints(hints: list[OperatorHints], on_device: str, reason: str) -> None:
    placement = place(chain(*hints), has_device=True)
    assert "".join(sorted(placement.on_device)) == on_device
    assert placement.reason.startswith(reason)
    assert "\n" not in placement.reason


@pytest.mark.parametrize(
    ("figures", "in_use", "on_device", "reason"),
    [
        # Workers are slow, the device has time: the cut where both take the same.
        (
            load([2, 2, 2], [1, 1, 1]),
            "",
            "12",
            "measured: '1', '2' on the device, 3000.0 ms a batch instead of 6000.0 ms$",
        ),
        (
            load([2, 2, 2], [1, 1, 1], num_workers=6),
            "",
            "",
            "measured: nothing on the device, 1000.0 ms a batch, elsewhere hardly less$",
        ),
        # The device is the slower one already.
        (load([2, 2, 2], [1, 1, 1], training_s=9.0), "", "", "measured: nothing"),
        (
            load([2, 2, 2], [1, 1, 1], training_s=9.0),
            "12",
            "",
            "measured: nothing .* 9000.0 ms a batch instead of 11000.0",
        ),
        # It hardly waits, so nothing moves there, whatever the sums say; back it may.
        (load([2, 2, 2], [1, 1, 1], waiting_s=0.01), "", "", "measured, the device hardly waits: nothing"),
        (load([1, 1, 1], [9, 9, 9], waiting_s=0.01), "12", "", "measured, the device hardly waits: nothing"),
        # A gain below 5 % is noise.
        (load([2, 0.05, 0.05], [0, 0, 0]), "", "", "measured: nothing on the device, 2100.0 ms a batch, elsewhere"),
        (load([2, 0.05, 0.05], [0, 0, 0]), "2", "2", "measured: '2' on the device, 2050.0 ms a batch, elsewhere"),
        # Without workers the two sides take turns.
        (load([2, 2, 2], [3, 3, 1], num_workers=0), "", "2", "measured: '2' on the device"),
        # Reading is a part of a worker's time, and a batch has many samples.
        (load([0, 1, 1], [0, 0.1, 0.1], training_s=3.0), "", "", "measured: nothing"),
        (
            load([0, 1, 1], [0, 0.1, 0.1], training_s=3.0, reading_s=4.0),
            "",
            "12",
            "measured: '1', '2' on the device, 4000",
        ),
        (
            load([0, 1, 1], [0, 0.1, 0.1], training_s=3.0, batch_size=4),
            "",
            "12",
            "measured: '1', '2' on the device, 32",
        ),
        # Of placements that take as long, fewer bytes, then less on the device.
        (load([1, 2, 2], [1, 1, 1], training_s=3.0), "", "2", "measured: '2' on the device"),
        # What was not measured on a side stays away from it.
        (load([2, 2, 2], [-1, -1, 1]), "", "2", "measured: '2' on the device"),
        (load([2, -1, 2], [1, 1, 1]), "", "", "by hints, as the load lacks steps of the placement in use: nothing"),
    ],
)
def test_placement_by_load(figures: Load, in_use: str, on_device: str, reason: str) -> None:
    placement = place(chain(WORKER, ANY, ANY), has_device=True, load=figures, current=tuple(in_use))
    assert "".join(sorted(placement.on_device)) == on_device
    assert re.match(reason, placement.reason)


def test_of_equally_fast_placements_the_one_with_the_fewest_bytes_is_chosen() -> None:
    figures = load([1, 2, 0.01, 0.01], [1, 0.01, 0.01, 0.01])
    shrinks, grows = replace(ANY, memory=0.5), replace(ANY, memory=4.0)
    for second, last, on_device in ((ANY, ANY, "123"), (shrinks, grows, "123"), (grows, shrinks, "123")):
        placement = place(chain(WORKER, second, ANY, last), has_device=True, load=figures)
        assert "".join(sorted(placement.on_device)) == on_device
    figures = load([1, 0.01, 0.01, 1], [1, 0.01, 0.01, 0.01])
    for second, third, on_device in ((ANY, ANY, "3"), (ANY, grows, "23"), (grows, ANY, "123")):
        placement = place(chain(WORKER, second, third, ANY), has_device=True, load=figures)
        assert "".join(sorted(placement.on_device)) == on_device


def random_graph(rng: random.Random) -> OperatorGraph:
    graph = OperatorGraph()
    names = ["x"]
    on_device: set[str] = set()
    for number in range(rng.randrange(1, 9)):
        inputs = rng.choices(names, k=rng.randrange(1, 3))
        hints = rng.choice([ANY, ANY, DEVICE] if on_device.intersection(inputs) else [ANY, ANY, WORKER, DEVICE, HEAVY])
        if hints is DEVICE or on_device.intersection(inputs):
            on_device.add(f"{number}")
        names.append(graph.add(lambda *values: sum(values) + 1, inputs=inputs, output=f"{number}", hints=hints))
    return graph


def test_whatever_is_measured_the_parts_are_the_whole_and_a_move_is_a_gain() -> None:
    def seconds(on_device: frozenset[str]) -> float:
        worker = sum(figures.worker_s[name] for name in names - on_device)
        device = sum(figures.device_s[name] for name in names & on_device)
        return max(figures.batch_size * worker / figures.num_workers, figures.training_s + device)

    for case in range(300):
        rng = random.Random(case)
        graph = random_graph(rng)
        names = {step.output for step in graph.steps}
        figures = Load(
            worker_s={name: rng.expovariate(1) for name in names},
            device_s={name: rng.expovariate(1) for name in names},
            batch_size=rng.randrange(1, 5),
            num_workers=rng.randrange(1, 5),
            training_s=rng.expovariate(1),
            waiting_s=9.0,
        )
        by_hints = place(graph, has_device=True)
        placement = place(graph, has_device=True, load=figures, current=by_hints.on_device)
        assert seconds(placement.on_device) <= seconds(by_hints.on_device)
        again = place(graph, has_device=True, load=figures, current=placement.on_device)
        assert again.on_device == placement.on_device  # it does not swing
        sides = sides_of(graph)
        for each in (by_hints, placement):
            assert set(sides.device) <= each.on_device <= {*sides.device, *sides.either}
            made = each.worker({"x": case})
            assert (each.device(made) if each.device else made) == graph({"x": case})


def test_measured_on_samples_and_batches_both_sides_make_the_same_batch() -> None:
    graph = OperatorGraph(outputs=["y", "label"])
    graph.add(lambda seed: torch.full((3,), float(seed)), inputs="seed", output="x")
    graph.add(lambda x: x / 2, inputs="x", output="half", hints=replace(ANY, compute="medium"))
    graph.add(lambda half: half + 1, inputs="half", output="y", hints=ANY)
    sides = sides_of(graph)
    samples = [{"seed": seed, "label": seed} for seed in range(4)]
    workers, devices = graph.split(sides.device)[0], graph.split((*sides.either, *sides.device))
    batch = default_collate([devices[0](sample) for sample in samples])
    figures = Load(workers.measure(samples[0]), devices[1].measure(batch), 4, 1, training_s=0.0, waiting_s=1.0)
    expected = default_collate([graph(sample) for sample in samples])
    for placement in (place(graph, has_device=True), place(graph, has_device=True, load=figures)):
        made = default_collate([placement.worker(sample) for sample in samples])
        made = made if placement.device is None else placement.device(made)
        assert made.keys() == expected.keys()
        assert all(torch.equal(made[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"num_workers": -1}, {"training_s": float("nan")}, {"waiting_s": -1.0}]
)
def test_a_load_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    (name, value), *_ = wrong.items()
    make: Callable[..., Load] = load
    with pytest.raises(ValueError, match=f"{name}={value!r} must be at least"):
        make([], [], **wrong)
