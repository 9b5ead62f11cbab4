"""Datasets whose samples take a time that is known."""

import random
import time

import torch
from torch import Tensor
from torch.utils.data import Dataset

KINDS = 8  # different samples


class Sleeping(Dataset[Tensor]):
    """Samples that lie in memory, of which some are slept for: that needs no processor.

    Args:
        length: Number of samples.
        sample_bytes: Size of each.
        seconds: By sample, what it takes; the others take nothing.
    """

    def __init__(self, length: int, sample_bytes: int, seconds: dict[int, float]) -> None:
        self._samples = torch.randint(0, 255, (KINDS, sample_bytes), dtype=torch.uint8)
        self._length, self._seconds = length, seconds

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tensor:
        if index in self._seconds:
            time.sleep(self._seconds[index])
        return self._samples[index % KINDS]


def with_slow_ones(length: int, usual_s: float, slow_s: float, share: float) -> dict[int, float]:
    """What each sample takes, where a share of them, drawn at random but always the same, is slow."""
    slow = set(random.Random(0).sample(range(length), round(share * length)))
    return {index: slow_s if index in slow else usual_s for index in range(length)}


def read(batch: Tensor) -> None:
    """Touches every byte."""
    flat = batch.view(-1)
    flat[: len(flat) // 8 * 8].view(torch.int64).sum()
