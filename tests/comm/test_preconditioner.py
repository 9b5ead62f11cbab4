"""What a codec's error is relative to, and what the running means must survive."""

import torch
from torch import Tensor

from lightning_hpc.comm.codecs import BlockCodec, make_codec
from lightning_hpc.comm.layout import Grain, ParameterSpec, Run, codec_slices
from lightning_hpc.comm.preconditioner import Preconditioner

CPU = torch.device("cpu")
BLOCK = 128
SPEC = ParameterSpec("weight", 1000, 10)


def run_of(*specs: ParameterSpec) -> Run:
    (layout,) = codec_slices(specs, 1, 10**6, Grain(block=BLOCK), {spec.name: 0 for spec in specs})
    return layout.run(0, layout.numel)


def padded(run: Run, values: Tensor) -> Tensor:
    return torch.cat((values, torch.zeros(run.numel - values.numel())))


def magnitudes() -> Tensor:
    """From 1 to 20, in any order."""
    return 20 ** torch.rand(SPEC.numel, generator=torch.Generator().manual_seed(1))


def noise(step: int) -> Tensor:
    return torch.randn(SPEC.numel, generator=torch.Generator().manual_seed(step))


def taught(run: Run, steps: int = 100, factor: float = 1.0) -> Preconditioner:
    preconditioner = Preconditioner(BLOCK)
    for step in range(steps):
        preconditioner.update(run, padded(run, factor * magnitudes() * noise(step)))
    return preconditioner


def test_without_a_sum_nothing_is_changed() -> None:
    run = run_of(SPEC)
    assert torch.equal(Preconditioner(BLOCK).scale(run, CPU), torch.ones(run.numel))


def test_scaled_numbers_are_alike_in_size() -> None:
    run = run_of(SPEC)
    blocks = (padded(run, magnitudes()) / taught(run).scale(run, CPU)).view(-1, BLOCK)[:-1]
    assert (blocks.amax(1) / blocks.amin(1)).max() < 4  # 20 before


def test_small_numbers_get_the_relative_error_of_large_ones() -> None:
    codec, run = make_codec("int4"), run_of(SPEC)
    assert isinstance(codec, BlockCodec)
    values = magnitudes() * noise(1000)
    small = magnitudes() < 2

    def error(scale: Tensor) -> float:
        decoded = codec.decode(codec.encode((padded(run, values) / scale).view(-1, BLOCK))).flatten() * scale
        lost = (decoded[: SPEC.numel] - values)[small]
        return (lost.norm() / values[small].norm()).item()

    assert error(torch.ones(run.numel)) > 0.5
    assert error(taught(run).scale(run, CPU)) < 0.2


def test_only_the_ratio_counts() -> None:
    run = run_of(SPEC)
    assert torch.equal(taught(run).scale(run, CPU), taught(run, factor=2.0**60).scale(run, CPU))


def test_scales_are_bounded_whatever_came() -> None:
    run = run_of(SPEC)
    for value in (0.0, 2.0**-149, 1e-38, 1.0, torch.finfo(torch.float32).max):
        preconditioner = Preconditioner(BLOCK)
        for _ in range(50):
            preconditioner.update(
                run, padded(run, torch.full((SPEC.numel,), value) * (torch.arange(SPEC.numel) % 3).clamp(max=1))
            )
        scale = preconditioner.scale(run, CPU)
        assert scale.isfinite().all()
        assert scale.min() >= 1
        assert scale.max() <= 50.01


def test_a_number_that_is_seen_for_the_first_time_leaves_something_to_the_others() -> None:
    run, scale = run_of(SPEC), torch.ones(0)
    preconditioner = Preconditioner(BLOCK)
    for step in range(100):
        sums = padded(run, noise(step))
        sums[5] = 0
        preconditioner.update(run, sums)
    scale = preconditioner.scale(run, CPU)
    assert scale[5] == 1
    assert scale[:BLOCK].max() <= 50.01


def test_it_may_be_told_to_stay() -> None:
    run = run_of(SPEC)
    preconditioner = taught(run)
    before = preconditioner.scale(run, CPU)
    preconditioner.update(run, torch.full((run.numel,), torch.nan), unless=torch.tensor(True))
    assert torch.equal(preconditioner.scale(run, CPU), before)
    other = taught(run)
    for each, unless in ((preconditioner, torch.tensor(False)), (other, None)):
        each.update(run, padded(run, noise(1000)), unless)
    assert torch.equal(preconditioner.scale(run, CPU), other.scale(run, CPU))
    assert not torch.equal(preconditioner.scale(run, CPU), before)


def test_padding_has_no_part_in_it() -> None:
    run, noisy = run_of(SPEC), Preconditioner(BLOCK)
    for step in range(100):
        sums = padded(run, magnitudes() * noise(step))
        sums[SPEC.numel :] = 1e6
        noisy.update(run, sums)
    assert torch.equal(noisy.scale(run, CPU), taught(run).scale(run, CPU))


def test_means_stay_with_their_parameter_when_runs_change_and_through_a_checkpoint() -> None:
    alone, other = run_of(SPEC), ParameterSpec("other", 300, 3)
    together = run_of(other, SPEC)
    fresh, preconditioner = Preconditioner(BLOCK), taught(alone)
    fresh.load_state_dict(preconditioner.state_dict())
    expected = preconditioner.scale(alone, CPU)
    for each in (fresh, preconditioner):
        scale = each.scale(together, CPU)
        part = next(part for part in together.parts if part.parameter is SPEC)
        assert torch.equal(scale[part.offset : part.offset + part.numel], expected[: SPEC.numel])
        each.load_state_dict({})
        assert torch.equal(each.scale(together, CPU), torch.ones(together.numel))
