"""Batches never change under their holder, slots and descriptors do not leak, batches of any size get through.

`python -m tests.data.soak_loader` runs `hold_at_random` and `watch_growth` for long.
"""

import gc
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.dlpack import from_dlpack

from lightning_hpc.data.loader import SharedMemoryLoader
from lightning_hpc.data.mapping import PAGE
from tests.data.datasets import FetchedTogether, Growing, Numbers, Parts, as_list, assert_same
from tests.data.test_ring import HOLDERS

OF_ARRAYS: dict[str, Callable[[Any], Any]] = {
    "array": lambda array: array,
    "slice": lambda array: array[..., ::3],
    "transposed": lambda array: array.T,
    "tensor": torch.from_numpy,
    "memoryview": lambda array: array.data,
}
OF_TENSORS = {**HOLDERS, "shared": Tensor.share_memory_}
del OF_TENSORS["graph"]  # holds, but its value is another one


class Leaves(Dataset[Any]):
    """Large and small tensors and arrays full of the index."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> Any:
        return {"large": torch.full((300,), index), "number": index, "rows": [np.full((20, 40), index, np.float32)]}


def collate_arrays(samples: Sequence[Any]) -> Any:
    numbers = np.array([sample["number"] for sample in samples])
    rows = numbers[:, None].repeat(400, axis=1)
    return {
        "large": torch.from_numpy(rows.copy()),
        "number": torch.from_numpy(numbers),
        "rows": [rows, np.asfortranarray(rows, np.float32)],
    }


class Held:
    """One leaf of a batch, in some form, and what has to stay in it.

    Args:
        leaf: The leaf.
        rng: Chooses the form.
    """

    def __init__(self, leaf: Any, rng: random.Random) -> None:
        forms = OF_TENSORS if isinstance(leaf, Tensor) else OF_ARRAYS
        self.form = rng.choice(list(forms))
        expected = forms[self.form](leaf.clone() if isinstance(leaf, Tensor) else leaf.copy(order="K"))
        self.value = forms[self.form](leaf)
        self.expected = _bytes_of(expected)

    def check(self) -> None:
        if type(self.value).__name__ == "PyCapsule":
            self.value = from_dlpack(self.value)  # it can be asked once only
        assert _bytes_of(self.value) == self.expected, self.form


def _bytes_of(held: Any) -> bytes:
    if type(held).__name__ == "PyCapsule":
        held = from_dlpack(held)
    if isinstance(held, torch.UntypedStorage):
        held = torch.empty(0, dtype=torch.uint8).set_(held)
    if isinstance(held, Tensor):
        held = held.detach().contiguous().numpy()
    return bytes(held.tobytes())


def leaves_of(batch: Any) -> Iterator[Any]:
    for value in batch.values():
        yield from value if isinstance(value, list) else [value]


def holds(leaf: Any, numbers: Sequence[int]) -> bool:
    rows = torch.as_tensor(leaf).double().reshape(len(numbers), -1)
    return torch.equal(rows, torch.tensor(numbers, dtype=torch.float64)[:, None].expand_as(rows))


def random_loader(rng: random.Random, batches: list[list[int]]) -> SharedMemoryLoader[Any]:
    return SharedMemoryLoader(
        Leaves(),
        batch_sampler=batches,
        num_workers=rng.choice([1, 2, 3]),
        prefetch_factor=rng.choice([1, 2, 4]),
        collate_fn=rng.choice([None, collate_arrays]),
        persistent_workers=rng.choice([None, False, True]),
    )


def hold_at_random(rounds: int, seed: int) -> None:
    """Draws batches from loader after loader, keeps parts of them in all forms, and looks whether they change."""
    rng, held, drawn = random.Random(seed), list[Held](), 0
    while drawn < rounds:
        length = min(rng.choice([5, 50, 400]), rounds)
        batches = [[rng.randrange(10**6)] * rng.choice([1, 1, 2, 3, 5, 8, rng.choice([1, 60])]) for _ in range(length)]
        loader = random_loader(rng, batches)
        for _ in range(rng.randrange(1, 4)):
            most = rng.choice([0, 3, 20, 80])
            for numbers, batch in itertools.islice(zip(batches, loader, strict=False), rng.choice([length, 7])):
                drawn += 1
                for leaf in leaves_of(batch):
                    assert holds(leaf, numbers)
                    if rng.random() < 0.5:
                        held.append(Held(leaf, rng))
                while len(held) > most:
                    held.pop(rng.randrange(len(held))).check()
                if held:
                    rng.choice(held).check()
            if loader._stream is not None:
                assert loader._stream._ring.count <= 2 * loader._stream._ring._limit
    for each in held:
        each.check()


@pytest.mark.timeout(60)
def test_no_batch_changes_under_its_holder() -> None:
    hold_at_random(400, seed=0)


def test_batches_of_all_epochs_can_be_kept_and_the_number_of_slots_is_bounded() -> None:
    loader = SharedMemoryLoader(Numbers(120, 1000), 2, num_workers=2)
    kept = [list(loader) for _ in range(3)]
    for epoch in kept:
        assert [int(row[0]) for batch in epoch for row in batch] == list(range(120))
        assert all(holds(batch, batch[:, 0].tolist()) for batch in epoch)
    assert loader._stream is not None
    assert loader._stream._ring.count <= loader._stream._ring._limit + 4


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def memory_maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:lightning_hpc")


def shared_bytes(loader: SharedMemoryLoader[Any]) -> int:
    assert loader._stream is not None
    return os.fstat(loader._stream._settings.mapping._descriptor).st_blocks * 512


def pss_kib() -> int:
    """Without pages of files: this process's part of them grows when another one that has mapped them ends."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(rollup.split(f"\n{kind}:")[1].split()[0]) for kind in ("Pss_Anon", "Pss_Shmem"))


class SizesVary(Numbers):
    """Rows of up to 4000, of which some raise."""

    def __getitem__(self, index: int) -> Tensor:
        if index % 97 == 5:
            raise ValueError("planted")
        return torch.full((random.Random(index).randrange(1, 4000),), index)


def drain(batches: Iterable[Any], most: int) -> int:
    iterator, drawn = iter(batches), 0
    while drawn < most:
        try:
            next(iterator)
        except ValueError:
            pass
        except StopIteration:
            break
        drawn += 1
    return drawn


def assert_nothing_is_abandoned(loader: SharedMemoryLoader[Any]) -> None:
    """Sooner or later, when each worker has done something."""
    assert loader._stream is not None
    for _ in range(1000):
        if not loader._stream._abandoned:
            return
        drain(loader, 100)
    raise AssertionError(f"{len(loader._stream._abandoned)} tasks are abandoned for good")


def watch_growth(batches: int) -> tuple[int, int]:
    """Epochs that end, are broken off or meet errors; returns Pss in KiB after the first half and at the end."""
    loader, rng = SharedMemoryLoader(SizesVary(100), 1, shuffle=True, num_workers=2), random.Random(0)
    found: list[tuple[int, int]] = []
    pss = []
    for half in range(2):
        drawn = 0
        while drawn < batches // 2:
            drawn += drain(loader, rng.choice([100, 100, 3]))
        drain(loader, 100)
        gc.collect()
        found.append((descriptors(), memory_maps()))
        pss.append(pss_kib())
        assert half == 0 or found[0] == found[1]
    assert_nothing_is_abandoned(loader)
    assert loader._stream is not None
    ring = loader._stream._ring
    assert ring.count <= ring._limit
    assert shared_bytes(loader) <= PAGE + ring.count * ring.slot_bytes
    return pss[0], pss[1]


def test_nothing_grows_from_batch_to_batch() -> None:
    before, after = watch_growth(600)
    assert after < before + 512


def test_everything_is_given_back_with_the_loader_and_its_batches() -> None:
    gc.collect()
    before = descriptors(), memory_maps()
    loader = SharedMemoryLoader(Numbers(8, 1000), 2, num_workers=2)
    held = list(loader)[-1]
    assert memory_maps() == before[1] + 1
    del loader
    assert memory_maps() == before[1] + 1
    assert holds(held, [6, 7])
    del held
    assert (descriptors(), memory_maps()) == before


@pytest.mark.parametrize("batch_size", [None, 1])
def test_batches_that_outgrow_their_slots(batch_size: int | None) -> None:
    sizes = [1, 3, 300, 7, 1000, 1, 1000, 1500, 1501, 40, 3000, 2]
    loader = SharedMemoryLoader(Growing(sizes), batch_size, num_workers=3)
    for _ in range(2):
        for index, (size, batch) in enumerate(zip(sizes, loader, strict=True)):
            assert holds(batch["fixed"], [index])
            assert batch["rows"].numel() == size * 100
            assert holds(batch["rows"], [index])


class Sentences(Numbers):
    def __getitem__(self, index: int) -> Any:
        return {"text": [f"word {index} {number}" for number in range(500)], "row": torch.full((700,), index)}


def test_packed_batches_larger_than_a_message() -> None:
    for numbers, batch in zip(
        [range(30), range(30, 60)], SharedMemoryLoader(Sentences(60), 30, num_workers=1), strict=True
    ):
        assert_same(batch["text"], [tuple(f"word {index} {place}" for index in numbers) for place in range(500)])
        assert holds(batch["row"], numbers)


class Indices(FetchedTogether):
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return list(indices)


@pytest.mark.parametrize("collate_fn", [None, as_list])
def test_index_lists_larger_than_a_message(collate_fn: Any) -> None:
    batches = [list(range(first, first + 100_000)) for first in range(3)]
    loader = SharedMemoryLoader(Indices(10**6), batch_sampler=batches, num_workers=1, collate_fn=collate_fn)
    for expected, batch in zip(batches, loader, strict=True):
        assert torch.as_tensor(batch).tolist() == expected


def test_workers_go_on_while_a_batch_is_used_and_never_further_than_asked() -> None:
    drawn: list[int] = []

    def watched() -> Iterator[list[int]]:
        for index in range(12):
            drawn.append(index)
            yield [index]

    class Watched:
        def __iter__(self) -> Iterator[list[int]]:
            return watched()

    for prefetch, workers in ((1, 1), (2, 2)):
        drawn.clear()
        loader = SharedMemoryLoader(Numbers(12), batch_sampler=Watched(), num_workers=workers, prefetch_factor=prefetch)
        for position, _ in enumerate(loader):
            assert len(drawn) == min(12, position + 1 + prefetch * workers)


def test_a_new_iterator_ends_the_one_before() -> None:
    loader = SharedMemoryLoader(Parts(20), 2, num_workers=1)
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(RuntimeError, match="persistent_workers=False"):
        next(first)
    assert torch.cat(list(second))[:, 0].tolist() == list(range(20))
