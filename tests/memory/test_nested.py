import torch

from lightning_hpc.memory.nested import flatten, tensors_in, unflatten
from tests.memory.block_models import Pair, equal


def test_a_value_is_put_together_again() -> None:
    value = {"pair": Pair(torch.ones(2), torch.zeros(3)), "list": [None, "text", (torch.ones(1),)]}
    again = unflatten(*flatten(value))
    assert equal(again, value)
    assert isinstance(again["pair"], Pair)


def test_tensors_are_found_anywhere() -> None:
    tensors = [torch.ones(1), torch.ones(2)]
    assert list(map(id, tensors_in({"a": [tensors[0], 3], "b": (tensors[1],)}))) == list(map(id, tensors))
    assert tensors_in("text") == []
