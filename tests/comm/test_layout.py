"""The invariant: a parameter is cut in one way, whatever bucket it is in, and nothing is lost or sent twice."""

import itertools
import random
from collections.abc import Sequence

import pytest

from lightning_hpc.comm.layout import (
    Grain,
    ParameterSpec,
    SliceLayout,
    assign_homes,
    codec_slices,
    exact_slices,
)

SIZES = (0, 1, 5, 255, 256, 257, 4096, 300_000)
BLOCKS = (1, 64, 256, None)
SLICES = (1, 300, 5000, 1 << 20)

Cut = tuple[str, int, int, int, int]


def random_parameters(rng: random.Random) -> list[ParameterSpec]:
    sizes = [rng.choice(SIZES) for _ in range(rng.randint(1, 8))]
    return [ParameterSpec(f"layer.{index}", size, rows=1) for index, size in enumerate(sizes)]


def random_grain(rng: random.Random) -> Grain:
    return Grain(rng.choice(BLOCKS), min_numel=rng.choice([0, 256, 4097]), grouped=rng.random() < 0.5)


def random_buckets(rng: random.Random, parameters: Sequence[ParameterSpec]) -> list[list[ParameterSpec]]:
    """The same parameters in another order and in other buckets."""
    shuffled = rng.sample(parameters, len(parameters))
    cuts = sorted(rng.choices(range(len(shuffled) + 1), k=rng.randint(0, 3)))
    return [shuffled[a:b] for a, b in zip([0, *cuts], [*cuts, len(shuffled)], strict=True)]


def leaf_of(layout: SliceLayout, offset: int) -> int:
    return next(leaf for leaf in range(len(layout.bounds)) if offset < layout.bounds[leaf + 1])


def cuts_of(slices: Sequence[SliceLayout]) -> set[Cut]:
    """For each part: what it holds, which leaf has it, and whether it is compressed."""
    return {
        (part.parameter.name, part.start, part.numel, leaf_of(layout, part.offset), layout.compressed)
        for layout in slices
        for part in layout.parts
    }


@pytest.mark.parametrize("seed", range(60))
def test_every_element_is_in_one_part_and_every_part_in_one_leaf(seed: int) -> None:
    rng = random.Random(seed)
    bucket, leaves, grain = random_parameters(rng), rng.randint(1, 12), random_grain(rng)
    slices = codec_slices(bucket, leaves, rng.choice(SLICES), grain, assign_homes(bucket, leaves))

    of_parameters: dict[str, list[tuple[int, int]]] = {spec.name: [] for spec in bucket if spec.numel}
    of_bucket: list[tuple[int, int]] = []
    for layout in slices:
        block = (grain.block or 1) if layout.compressed else 1
        assert layout.bounds[0] == 0
        assert layout.bounds[-1] == layout.numel
        assert len(layout.bounds) == leaves + 1
        assert list(layout.bounds) == sorted(layout.bounds)
        assert all(bound % block == 0 for bound in layout.bounds)
        end = 0
        for part in layout.parts:
            assert part.numel > 0
            assert layout.compressed == (part.parameter.numel >= grain.min_numel)
            assert part.offset % block == 0
            assert end <= part.offset < end + block  # one after the other, with less than a block of padding between
            end = part.offset + part.numel
            assert end <= layout.bounds[leaf_of(layout, part.offset) + 1]
            of_parameters[part.parameter.name].append((part.start, part.start + part.numel))
            of_bucket.append((part.source, part.source + part.numel))
        assert end <= layout.numel < end + block

    for spec in bucket:
        if spec.numel:
            assert_tiles(of_parameters[spec.name], spec.numel)
    assert_tiles(of_bucket, sum(spec.numel for spec in bucket))


def assert_tiles(runs: list[tuple[int, int]], end: int) -> None:
    position = 0
    for start, stop in sorted(runs):
        assert start == position
        position = stop
    assert position == end


@pytest.mark.parametrize("seed", range(60))
def test_cuts_depend_on_the_parameter_alone(seed: int) -> None:
    rng = random.Random(seed)
    parameters, leaves, grain = random_parameters(rng), rng.randint(1, 12), random_grain(rng)
    homes = assign_homes(parameters, leaves)
    first, *others = [
        set().union(
            *(
                cuts_of(codec_slices(bucket, leaves, slice_numel, grain, homes))
                for bucket in random_buckets(rng, parameters)
            )
        )
        for slice_numel in SLICES
        for _ in range(2)
    ]
    assert all(other == first for other in others)


@pytest.mark.parametrize("seed", range(30))
def test_parts_lie_alike_in_bucket_and_parameter(seed: int) -> None:
    rng = random.Random(seed)
    bucket, leaves = random_parameters(rng), rng.randint(1, 12)
    sums = itertools.accumulate((spec.numel for spec in bucket), initial=0)
    begins = dict(zip((spec.name for spec in bucket), sums, strict=False))
    for layout in codec_slices(bucket, leaves, rng.choice(SLICES), random_grain(rng), assign_homes(bucket, leaves)):
        for part in layout.parts:
            assert part.source - begins[part.parameter.name] == part.start


def test_slices_are_near_the_wanted_size_and_a_codec_that_picks_has_a_slice_for_each_piece() -> None:
    bucket = [ParameterSpec(f"layer.{index}", 1000, 10) for index in range(64)]
    homes = assign_homes(bucket, 4)
    grouped = codec_slices(bucket, 4, 8000, Grain(block=1), homes)
    assert [layout.numel for layout in grouped] == [8000] * 8
    single = codec_slices(bucket, 4, 8000, Grain(block=1, grouped=False), homes)
    assert [len({part.parameter.name for part in layout.parts}) for layout in single] == [1] * 64
    large = [ParameterSpec("large", 3 * 2**18 + 7, 1)]
    assert len(codec_slices(large, 4, 2**18, Grain(block=256), {"large": 0})) == 4


def test_a_block_larger_than_a_piece_makes_the_piece_larger() -> None:
    bucket = [ParameterSpec("weight", 2**19 + 3, 1)]
    block = 2**18 + 1
    slices = codec_slices(bucket, 2, 2**20, Grain(block=block), {"weight": 0})
    assert sum(part.numel for layout in slices for part in layout.parts) == bucket[0].numel
    assert all(layout.numel % block == 0 for layout in slices)


@pytest.mark.parametrize("numel", [0, 1, 2, 5, 1000, 4097])
@pytest.mark.parametrize("leaves", [1, 3, 12])
def test_exact_slices_tile_the_bucket(numel: int, leaves: int) -> None:
    for slice_numel in (1, 7, 1000, 1 << 20):
        slices = exact_slices(numel, leaves, slice_numel)
        assert_tiles([(layout.start, layout.start + layout.numel) for layout in slices], numel)
        for layout in slices:
            assert layout.bounds[0] == 0
            assert layout.bounds[-1] == layout.numel
            assert list(layout.bounds) == sorted(layout.bounds)
            assert 0 < layout.numel <= max(2 * slice_numel, 1)  # a small rest is spread over the others


@pytest.mark.parametrize("seed", range(30))
def test_homes_are_balanced(seed: int) -> None:
    rng = random.Random(seed)
    sizes, leaves = [rng.choice(SIZES) for _ in range(rng.randint(1, 7))], rng.randint(1, 3)
    homes = assign_homes([ParameterSpec(str(index), size, 1) for index, size in enumerate(sizes)], leaves)
    best = min(heaviest(sizes, choice, leaves) for choice in itertools.product(range(leaves), repeat=len(sizes)))
    found = heaviest(sizes, [homes[str(index)] for index in range(len(sizes))], leaves)
    assert found <= (4 / 3 - 1 / (3 * leaves)) * best  # Graham (1969), of the longest processing time first


def heaviest(sizes: Sequence[int], homes: Sequence[int], leaves: int) -> int:
    return max(sum(size for size, home in zip(sizes, homes, strict=True) if home == leaf) for leaf in range(leaves))


def test_homes_do_not_depend_on_chance() -> None:
    parameters = [ParameterSpec(f"layer.{index}", 100, 1) for index in range(6)]
    assert assign_homes(parameters, 3) == {f"layer.{index}": index % 3 for index in range(6)}


def test_a_run_holds_the_parts_between_two_bounds() -> None:
    bucket = [ParameterSpec("weight", 1000, 10), ParameterSpec("bias", 3, 3)]
    (layout,) = codec_slices(bucket, 3, 10_000, Grain(block=64), assign_homes(bucket, 3))
    whole = layout.run(0, layout.numel)
    assert whole.parts == layout.parts
    runs = [layout.run(layout.bounds[leaf], layout.bounds[leaf + 1]) for leaf in range(3)]
    assert sum((run.parts for run in runs), ()) == layout.parts
    assert sum(run.numel for run in runs) == layout.numel
    assert layout.run(0, layout.numel) != whole  # a key by identity: equal runs of different layouts are different
