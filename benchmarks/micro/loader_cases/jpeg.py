"""The case about photographs: most of the time goes into decoding."""

import io
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.micro.loader_cases.figures import LOADERS, Figure, Size, Target, compare, count_workers, take_turns
from benchmarks.micro.loader_cases.speed import rate

BATCH = 32
PIXELS = 224
SOURCE_PIXELS = (256, 320, 400, 512)  # of the shorter side
PHOTOGRAPHS = ("china.jpg", "flower.jpg")


class Photographs(Dataset[Tensor]):
    """Two photographs in four sizes, as JPEG in memory; a sample is decoded, and resized to 224 x 224.

    Args:
        length: Number of samples.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._files = [
            _at_size((files("sklearn.datasets.images") / name).read_bytes(), pixels)
            for name in PHOTOGRAPHS
            for pixels in SOURCE_PIXELS
        ]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tensor:
        if index >= self._length:
            raise IndexError(index)
        image = _decode(self._files[index % len(self._files)]).resize((PIXELS, PIXELS))
        return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(PIXELS, PIXELS, 3)


def jpeg(size: Size) -> Iterator[Figure]:
    """Batches a second where samples are JPEG images that are decoded and resized: not fewer than `DataLoader`.

    Batches of 32 of scikit-learn's two photographs, from 256 to 512 pixels high, made 224 x 224. Needs Pillow.
    """
    target = Target("not slower than DataLoader", lambda _, ratio: ratio >= 1)
    dataset = Photographs(BATCH * size.of(30, least=8))
    for workers in (1, 2):
        found = take_turns(
            list(LOADERS), size, f"jpeg, {count_workers(workers)}", partial(rate, dataset, BATCH, workers)
        )
        yield from compare("jpeg", count_workers(workers), "batches/s", found, target)


def _decode(data: bytes) -> Any:
    image = import_module("PIL.Image")  # the other cases can do without it
    return image.open(io.BytesIO(data)).convert("RGB")


def _at_size(data: bytes, pixels: int) -> bytes:
    image, target = _decode(data), io.BytesIO()
    scale = pixels / min(image.size)
    image.resize(tuple(round(scale * side) for side in image.size)).save(target, "JPEG", quality=90)
    return target.getvalue()
