"""Small datasets and collate functions, and an exact comparison of batches, for the tests of the loader."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Point(NamedTuple):
    x: Tensor
    y: Any


class Numbers(Dataset[Tensor]):
    """Sample i is a row of i's.

    Args:
        length: Number of samples.
        width: Of a row.
        claimed: What `len` says, if not the truth.
    """

    def __init__(self, length: int, width: int = 4, claimed: int | None = None) -> None:
        self.length, self.width, self.claimed = length, width, claimed

    def __len__(self) -> int:
        return self.length if self.claimed is None else self.claimed

    def __getitem__(self, index: int) -> Tensor:
        if index >= self.length:
            raise IndexError(f"{index} of {self.length}")
        return torch.full((self.width,), index, dtype=torch.float32)


class Nested(Numbers):
    """Samples of everything that `default_collate` takes; `large` outgrows what is copied out."""

    def __getitem__(self, index: int) -> Any:
        return {
            "large": torch.full((7, 211), index, dtype=torch.bfloat16),
            "point": Point(torch.tensor([index, -index]), (np.full((3, 2), index, np.int16), np.float64(index / 3))),
            "list": [index, index / 7, str(index), [bytes([index % 256])]],
            "flag": torch.tensor(index % 2 == 0),
            "empty": torch.empty(0, 3),
        }


class FetchedTogether(Numbers):
    """Reads whole batches."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]


class Augmented(Numbers):
    """Draws from all three generators; `together` for a batch at once."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(2), np.random.rand(2), random.random()


class AugmentedTogether(Augmented):
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]


class Growing(Dataset[Any]):
    """Batches of one sample whose second field has as many rows as `sizes` says; all values are the index."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Any:
        return {"fixed": torch.full((1000,), index), "rows": torch.full((self.sizes[index], 100), index)}


class Parts(IterableDataset[Tensor]):
    """Worker w of W gives the numbers i with i % W == w, up to a limit of its own; without workers, all of them.

    Args:
        length: Numbers in all.
        limits: How many each worker gives at most, by worker; the last one's is of all further ones, too.
    """

    def __init__(self, length: int, limits: Sequence[int] = (10**9,)) -> None:
        self.length, self.limits = length, limits

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        own = range(worker, self.length, workers)
        for number in own[: self.limits[min(worker, len(self.limits) - 1)]]:
            yield torch.full((4,), number)


class Sized(Parts):
    def __len__(self) -> int:
        return self.length


def as_list(samples: Any) -> Any:
    return samples


def with_arrays(samples: Sequence[Any]) -> Any:
    """Arrays and tensors, large and small, one of them twice."""
    values = np.array([float(torch.as_tensor(_first(sample)).flatten()[0]) for sample in samples])
    large = values[:, None].repeat(500, axis=1)
    tensor = torch.from_numpy(values)[:, None].expand(-1, 300).contiguous()
    return {
        "array": large,
        "small": values,
        "fortran": np.asfortranarray(large),
        "tensor": [tensor, tensor],
        "none": None,
    }


def _first(sample: Any) -> Any:
    return sample[0] if isinstance(sample, tuple) else sample


def draws(samples: Sequence[Any]) -> Any:
    return torch.stack([sample[0] for sample in samples]), torch.rand(2)


def assert_same(one: Any, other: Any) -> None:
    """Types, shapes and every bit; keys in the same order."""
    assert type(one) is type(other), (type(one), type(other))
    if isinstance(one, Tensor):
        assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
        assert _bits(one) == _bits(other), (one, other)
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif isinstance(one, Mapping):
        assert list(one) == list(other)
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, Sequence) and not isinstance(one, (str, bytes)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert repr(one) == repr(other)


def _bits(tensor: Tensor) -> bytes:
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    plain = dense.as_subclass(Tensor).resolve_conj().resolve_neg().contiguous()
    return plain.flatten().view(torch.uint8).numpy().tobytes()
