"""Seeds: spread well, and nothing that is drawn for a sample is noticed elsewhere."""

import random
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.random import PCG64, SFC64, BitGenerator, Philox, get_bit_generator, set_bit_generator  # type: ignore[attr-defined]

from lightning_hpc.data import seeding
from lightning_hpc.data.seeding import GeneratorStates, KeptGenerators, mix, seed_all, seed_for


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def test_a_change_of_one_bit_changes_half_of_the_seed() -> None:
    rng = random.Random(0)
    for bit in range(64):
        changed = []
        for _ in range(200):
            words = rng.getrandbits(64), rng.getrandbits(20)
            changed.append(bin(mix(*words) ^ mix(words[0] ^ 1 << bit, words[1])).count("1"))
            changed.append(bin(mix(*words) ^ mix(words[0], words[1] ^ 1 << bit)).count("1"))
        assert 14.5 < sum(changed) / len(changed) < 17.5, bit


def test_seeds_of_neighbouring_epochs_and_samples_are_as_different_as_random_ones() -> None:
    seeds = {seed_for(epoch, index) for epoch in range(100) for index in range(1000)}
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert len(seeds) >= 100_000 - 10  # 1.2 collisions are expected


def test_the_order_and_number_of_words_count() -> None:
    assert len({mix(1, 2), mix(2, 1), mix(1), mix(1, 2, 0), mix(1, 0, 2), mix(-1, 2), mix(2**64 + 3)}) == 7


def test_any_key_has_a_seed_that_does_not_depend_on_the_process() -> None:
    assert len({seed_for(5, key) for key in (3, "3", (3, 1), (1, 3), None, 3.5)}) == 6
    assert seed_for(5, ("a", 1)) == mix(5, 2745452491)  # CRC of the text; `hash` is another one in each process


def test_all_three_generators_are_seeded() -> None:
    with KeptGenerators():
        drawn = []
        for seed in (1, 2, 1):
            seed_all(seed)
            drawn.append(draw())
    assert drawn[0] == drawn[2]
    assert all(one != other for one, other in zip(drawn[0], drawn[1], strict=True))


def test_generators_are_left_as_they_were_also_after_an_error() -> None:
    with KeptGenerators():
        seed_all(7)
        expected = draw()
        seed_all(7)
        try:
            with KeptGenerators():
                draw()
                seed_all(8)
                raise ValueError("planted")
        except ValueError:
            assert draw() == expected


@pytest.fixture(params=[True, False], ids=["its memory", "getstate"])
def python_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the memory of Python's generator, and as on a Python where it is not found."""
    assert seeding._python_memory() is not None or sys.implementation.name != "cpython"
    if not request.param:
        monkeypatch.setattr(seeding, "_python_memory", lambda: None)


@pytest.mark.usefixtures("python_memory")
def test_undone_draws_leave_no_trace_also_not_of_the_second_gaussian() -> None:
    with KeptGenerators():
        for odd in (False, True):
            seed_all(3)
            if odd:
                np.random.randn()
                random.gauss(0, 1)
                torch.randn(1)
            expected = np.random.randn(), random.gauss(0, 1), float(torch.randn(1)), *draw()
            seed_all(3)
            if odd:
                np.random.randn()
                random.gauss(0, 1)
                torch.randn(1)
            states = GeneratorStates()
            assert not states.have_changed()
            np.random.randn()
            random.gauss(0, 1)
            torch.randn(1)
            assert states.have_changed()
            states.restore()
            assert (np.random.randn(), random.gauss(0, 1), float(torch.randn(1)), *draw()) == expected


@pytest.mark.usefixtures("python_memory")
@pytest.mark.parametrize("drawing", [random.random, lambda: random.gauss(0, 1), np.random.rand, np.random.randn])
@pytest.mark.parametrize("odd", [False, True])
def test_every_draw_is_noticed(drawing: Callable[[], float], odd: bool) -> None:
    with KeptGenerators():
        seed_all(3)
        if odd:
            drawing()
        states = GeneratorStates()
        drawing()
        assert states.have_changed()


@pytest.mark.parametrize("generator", [Philox, SFC64, PCG64])
def test_another_generator_of_numpy_is_looked_at_and_put_back_too(generator: type[BitGenerator]) -> None:
    former = get_bit_generator()
    set_bit_generator(generator(3))
    try:
        states = GeneratorStates(GeneratorStates())
        assert not states.have_changed()
        drawn = np.random.rand()
        assert states.have_changed()
        states.restore()
        assert not states.have_changed()
        assert np.random.rand() == drawn
    finally:
        set_bit_generator(former)
