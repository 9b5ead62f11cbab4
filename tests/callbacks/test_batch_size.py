from collections import UserDict
from typing import Any

import pytest
import torch

from lightning_hpc.callbacks.batch_size import count_samples

ROWS = torch.zeros(5, 2)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (ROWS, 5),
        ([ROWS, torch.zeros(3)], 5),
        ((ROWS, "text"), 5),
        ({"x": ROWS, "y": 1}, 5),
        ([{"x": (ROWS,)}], 5),
        ({"x": torch.zeros(0, 2)}, 0),
        (torch.tensor(1.0), None),
        (["text", ROWS], None),
        ([], None),
        ({}, None),
        (None, None),
        (UserDict(x=ROWS), 5),
    ],
)
def test_the_first_tensor_tells(batch: Any, samples: int | None) -> None:
    assert count_samples(batch) == samples
