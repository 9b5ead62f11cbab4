import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_hpc.comm.codecs.topk import TopKCodec
from tests.comm.codecs.helpers import random_values, round_trip


def reference(values: Tensor, k: int) -> Tensor:
    """The k largest magnitudes, of equals the first, and zeros elsewhere."""
    indices = values.abs().sort(descending=True, stable=True).indices[:k]
    return torch.zeros_like(values).index_copy(0, indices, values[indices].bfloat16().float())


@pytest.mark.parametrize("numel", [1, 2, 255, 256, 257, 1000, 100_003])
@pytest.mark.parametrize("ratio", [1e-9, 0.01, 0.3, 1.0])
def test_exactly_the_k_largest_are_sent(numel: int, ratio: float) -> None:
    values = random_values(numel, seed=numel)
    codec = TopKCodec(ratio)
    k = max(1, round(ratio * numel))
    assert torch.equal(round_trip(codec, values), reference(values, k))
    packet = codec.encode(values)
    assert packet.numel() == 3 * k + 2 * ((numel + 255) // 256)


@pytest.mark.parametrize("numel", [1000, 100_000])
def test_of_equals_the_first_are_sent(numel: int) -> None:
    generator = torch.Generator().manual_seed(0)
    few_kinds = torch.randint(-3, 4, (numel,), generator=generator).float()
    rows = torch.zeros(numel)
    rows[: numel // 50] = 1.0
    for values in (torch.ones(numel), few_kinds, -few_kinds.abs(), rows):
        for ratio in (0.001, 0.01, 0.5):
            assert torch.equal(round_trip(TopKCodec(ratio), values), reference(values, round(ratio * numel)))


def test_large_numbers_that_a_sample_misses_or_overrates() -> None:
    """The sample takes every n-th number, so numbers in its places, or between them, mislead it most."""
    for stride in (5, 6, 7, 8, 9, 11, 12, 13, 24, 25):
        values = random_values(200_000, 1e-3)
        values[::stride] *= 1000
        assert torch.equal(round_trip(TopKCodec(0.01), values), reference(values, 2000))
        values = random_values(200_000, 1e-3)
        values[stride // 2 :: stride] *= 1000
        assert torch.equal(round_trip(TopKCodec(0.01), values), reference(values, 2000))


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.1, float("nan"), float("inf")])
def test_bad_ratio_is_quoted_with_what_is_allowed(ratio: float) -> None:
    with pytest.raises(ValueError, match=f"ratio={ratio} must be a number above 0 and at most 1"):
        TopKCodec(ratio)


@pytest.mark.parametrize("ratio", ["0.04", True, None, [0.04], torch.tensor(0.04)])
def test_a_ratio_that_is_no_number_is_refused(ratio: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"ratio={ratio!r} must be a number above 0 and at most 1")):
        TopKCodec(ratio)


@pytest.mark.parametrize("ratio", [1, np.float32(0.5)])
def test_numbers_of_any_kind_are_taken(ratio: Any) -> None:
    values = random_values(100, seed=1)
    assert torch.equal(round_trip(TopKCodec(ratio), values), reference(values, round(ratio * 100)))
