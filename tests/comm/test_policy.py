"""The invariant: whatever the predictions, the policy ends with what measures fastest, or as fast and more exact."""

import random
from collections.abc import Callable

import pytest

from lightning_hpc.comm.policy import CodecPolicy, Order

CHOICES = ("ddp", "none", "bf16", "int8", "int4")


def run(policy: CodecPolicy, seconds: Callable[[str, int], float], orders: int) -> list[Order]:
    """Carries out so many orders; ``seconds(choice, step)`` is what a step takes."""
    order, taken, step = policy.start(), [], 0
    for _ in range(orders):
        taken.append(order)
        durations = []
        for _ in range(order.steps):
            durations.append(seconds(order.choice, step))
            step += 1
        order = policy.next(durations)
    return taken


def constant(**seconds: float) -> Callable[[str, int], float]:
    return lambda choice, step: seconds[choice]


def test_it_keeps_the_fastest_and_says_why() -> None:
    predictions = {"ddp": 0.9, "none": 0.6, "bf16": 0.35, "int8": 0.25, "int4": 0.2}
    policy = CodecPolicy(CHOICES, predictions)
    orders = run(policy, constant(ddp=0.9, none=0.6, bf16=0.4, int8=0.22, int4=0.27), 6)
    assert [order.choice for order in orders[:2]] == ["int4", "int8"]  # what is predicted 1.4 x slower is not tried
    assert {order.choice for order in orders[2:]} == {"int8"}
    assert "int8 0.220 s (predicted 0.250), int4 0.270 s (predicted 0.200)" in policy.reason()
    assert "not tried: ddp 0.900, none 0.600, bf16 0.350" in policy.reason()


def test_of_equals_it_keeps_the_one_that_loses_less() -> None:
    policy = CodecPolicy(CHOICES, dict.fromkeys(CHOICES, 0.1))
    orders = run(policy, constant(ddp=0.1010, none=0.1, bf16=0.0999, int8=0.0995, int4=0.0995), 8)
    assert orders[-1].choice == "ddp"


def test_windows_grow_while_nothing_changes() -> None:
    policy = CodecPolicy(("ddp", "int8"), {"ddp": 1.0, "int8": 0.1})
    orders = run(policy, constant(ddp=1.0, int8=0.1), 8)
    assert [order.steps for order in orders[1:]] == [50, 100, 200, 400, 800, 1600, 1600]


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_it_tries_again_when_the_chosen_one_becomes_slower_or_faster(factor: float) -> None:
    policy = CodecPolicy(("ddp", "none"), {"ddp": 0.11, "none": 0.1})
    late = 30

    def seconds(choice: str, step: int) -> float:
        if choice == "none":
            return 0.1 * (factor if step >= late else 1)
        return 0.11

    orders = run(policy, seconds, 10)
    choices = [order.choice for order in orders]
    assert choices[:4] == ["none", "ddp", "none", "none"]
    assert policy.is_settled
    assert choices[-1] == ("ddp" if factor > 1 else "none")
    assert choices.count("ddp") >= 2  # tried twice


def test_a_slow_first_step_of_a_trial_does_not_count() -> None:
    policy = CodecPolicy(("ddp", "none"), {"ddp": 0.1, "none": 0.1})
    order = policy.start()
    order = policy.next([9.0] + [0.1] * (order.steps - 1))
    order = policy.next([0.2] * order.steps)
    assert order.choice == "ddp"


def test_any_predictions_end_at_the_best_of_those_tried() -> None:
    rng = random.Random(0)
    for _ in range(300):
        truth = {choice: rng.uniform(0.05, 1) for choice in CHOICES}
        predictions = {choice: truth[choice] * rng.uniform(0.85, 1.15) for choice in CHOICES}
        policy = CodecPolicy(CHOICES, predictions)
        last = run(policy, lambda choice, step, truth=truth: truth[choice], 9)[-1]  # type: ignore[misc]
        assert policy.is_settled
        assert truth[last.choice] <= 1.02 * min(truth.values())
