"""Hints: checked, attached to whatever can be called, and no change of the callable."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hpc.data.operators import OperatorHints, hints_of, operator


@operator(compute="high", memory=4.0, runs_on="any")
def double(x: Tensor) -> Tensor:
    return 2 * x


@operator(random=True)
class Noise:
    def __call__(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


def plain(x: Tensor) -> Tensor:
    return x


def test_a_decorated_function_is_the_function_itself() -> None:
    assert double(torch.ones(2)).tolist() == [2, 2]
    assert double.__name__ == "double"
    assert hints_of(double) == OperatorHints("high", 4.0, "any")
    assert pickle.loads(pickle.dumps(double)) is double


def test_instances_have_the_hints_of_their_class() -> None:
    assert hints_of(Noise()) == OperatorHints(random=True)


def test_modules_and_objects_take_hints_and_keep_them_through_a_copy_and_a_pickle() -> None:
    for given in (nn.Linear(2, 2), partial(plain)):
        function = operator(compute="medium", runs_on="device")(given)
        assert function is given
        for each in (function, copy.deepcopy(function), pickle.loads(pickle.dumps(function))):
            assert hints_of(each) == OperatorHints("medium", runs_on="device")


def test_without_hints_a_function_is_light_and_stays_in_the_worker() -> None:
    assert hints_of(plain) == OperatorHints("low", 1.0, "worker", random=False)
    assert hints_of(nn.Identity()) == OperatorHints()


@pytest.mark.parametrize(
    "hint",
    [
        {"compute": "huge"},
        {"compute": None},
        {"runs_on": "gpu"},
        {"memory": 0},
        {"memory": -1.0},
        {"memory": float("inf")},
        {"memory": float("nan")},
        {"memory": "4"},
        {"random": "yes"},
    ],
)
def test_a_wrong_hint_is_quoted(hint: dict[str, Any]) -> None:
    (name, value), *_ = hint.items()
    with pytest.raises(ValueError, match=f"{name}={value!r} must be"):
        operator(**hint)


def test_what_takes_no_attributes_is_sent_to_the_graph() -> None:
    with pytest.raises(TypeError, match=r"takes no attributes; use graph.add\(\.\.\., hints=OperatorHints\("):
        operator(compute="high")(torch.flip)
    with pytest.raises(TypeError, match="must be callable, got 3"):
        operator()(3)  # type: ignore[type-var]
