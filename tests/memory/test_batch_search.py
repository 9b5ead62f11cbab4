import math

import pytest

from lightning_hpc.memory.batch_search import BatchSearch, divisors


def find(sizes: list[int], largest: float) -> tuple[int | None, list[int]]:
    """What is found where sizes up to ``largest`` fit, and what was tried."""
    search, tried = BatchSearch(sizes), list[int]()
    while (size := search.size) is not None:
        tried.append(size)
        search.answer(size <= largest)
    return search.largest, tried


@pytest.mark.parametrize("number", [1, 2, 7, 12, 64, 97, 720, 1000])
def test_the_largest_that_fits_is_found_whatever_it_is(number: int) -> None:
    sizes = divisors(number)
    for largest in (0.0, *map(float, sizes), math.inf):
        found, tried = find(sizes, largest)
        assert found == max((size for size in sizes if size <= largest), default=None)
        assert len(set(tried)) == len(tried)
        assert found is None or found in tried  # what is taken has been tried
        assert len(tried) <= 2 * math.log2(len(sizes)) + math.log2(number) + 2


def test_it_begins_small_and_doubles() -> None:
    assert find([1, 2, 3, 4, 6, 8, 12, 24], 6.0)[1] == [1, 2, 4, 8, 6]
    assert find([3, 5, 15], 100.0)[1] == [3, 15]


@pytest.mark.parametrize("number", range(1, 200))
def test_divisors(number: int) -> None:
    assert divisors(number) == [each for each in range(1, number + 1) if number % each == 0]
