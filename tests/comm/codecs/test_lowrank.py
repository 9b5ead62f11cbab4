import io
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hpc.comm.codecs import Segment
from lightning_hpc.comm.codecs.lowrank import LowRankCodec
from tests.comm.codecs.helpers import MAGNITUDES, random_values

SEGMENTS = [
    Segment("embedding", 0, 300, 40),
    Segment("bias", 0, 1, 300),
    Segment("weight", 20 * 64, 70, 64),
    Segment("weight", 0, 20, 64),
    Segment("norm", 0, 9, 1),
]
NUMEL = sum(segment.numel for segment in SEGMENTS)
WHOLE = [Segment("w", 0, 60, 50)]


def low_rank_matrix(rows: int, columns: int, rank: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)


def step(codec: LowRankCodec, values: Tensor, segments: list[Segment]) -> Tensor:
    """What one node alone gets back."""
    message = codec.encode(values, segments)
    decoded = codec.decode(message, segments)
    codec.advance(message, segments)
    return decoded


@pytest.mark.parametrize("rank", [1, 3, 4])
def test_exact_from_the_second_step_on_for_matrices_of_that_rank(rank: int) -> None:
    codec, values = LowRankCodec(rank=4), low_rank_matrix(60, 50, rank).flatten()
    step(codec, values, WHOLE)
    for _ in range(3):
        assert (step(codec, values, WHOLE) - values).norm() < 1e-5 * values.norm()


def test_the_main_directions_are_found() -> None:
    values = (low_rank_matrix(60, 50, 4) + 0.1 * random_values(3000, seed=1).view(60, 50)).flatten()
    codec = LowRankCodec(rank=4)
    for _ in range(6):
        error = (step(codec, values, WHOLE) - values).norm()
    tail = torch.linalg.svdvals(values.view(60, 50))[4:].norm()
    assert error < 1.001 * tail


def test_messages_may_be_summed_before_they_are_decoded() -> None:
    codec = LowRankCodec(rank=4)
    for number in range(4):
        messages = [codec.encode(random_values(NUMEL, seed=10 * number + node), SEGMENTS) for node in range(3)]
        total = messages[0] + messages[1] + messages[2]
        decoded = sum(codec.decode(message, SEGMENTS) for message in messages)
        assert isinstance(decoded, Tensor)
        torch.testing.assert_close(codec.decode(total, SEGMENTS), decoded, rtol=1e-5, atol=1e-5)
        codec.advance(total, SEGMENTS)


def test_message_lengths() -> None:
    """Rows and columns by turns; vectors and small matrices, here the one of 20 rows, as they are."""
    codec, raw = LowRankCodec(rank=16), 300 + 20 * 64 + 9
    lengths = []
    for number in range(4):
        message = codec.encode(random_values(NUMEL, seed=number), SEGMENTS)
        codec.advance(message, SEGMENTS)
        lengths.append(message.numel())
    assert lengths == [raw + 16 * (300 + 70), raw + 16 * (40 + 64)] * 2


def test_what_is_sent_as_it_is_comes_back_exactly() -> None:
    values = random_values(NUMEL)
    decoded = step(LowRankCodec(rank=16), values, SEGMENTS)
    for (segment, before), after in zip(
        zip(SEGMENTS, values.split([segment.numel for segment in SEGMENTS]), strict=True),
        decoded.split([segment.numel for segment in SEGMENTS]),
        strict=True,
    ):
        assert torch.equal(before, after) == (segment.rows not in (300, 70))


def test_rank_is_clipped_to_the_matrix() -> None:
    """Three columns cannot have more than three directions, and these are sent as they are."""
    segments = [Segment("thin", 0, 1000, 3), Segment("flat", 0, 2, 1000)]
    values = random_values(5000)
    codec = LowRankCodec(rank=8)
    assert torch.equal(step(codec, values, segments), values)
    assert not codec.state_dict()


def test_two_nodes_with_error_feedback_lose_nothing() -> None:
    codecs = [LowRankCodec(rank=4) for _ in range(2)]
    residuals = [torch.zeros(NUMEL) for _ in range(2)]
    given, received = torch.zeros(NUMEL, dtype=torch.double), torch.zeros(NUMEL, dtype=torch.double)
    for number in range(200):
        corrected = [random_values(NUMEL, seed=2 * number + node) for node in range(2)]
        given += sum(corrected)
        corrected = [values + residual for values, residual in zip(corrected, residuals, strict=True)]
        messages = [codec.encode(values, SEGMENTS) for codec, values in zip(codecs, corrected, strict=True)]
        residuals = [
            values - codec.decode(message, SEGMENTS)
            for codec, values, message in zip(codecs, corrected, messages, strict=True)
        ]
        total = messages[0] + messages[1]
        decoded = [codec.decode(total, SEGMENTS) for codec in codecs]
        assert torch.equal(decoded[0], decoded[1])
        received += decoded[0]
        for codec in codecs:
            codec.advance(total, SEGMENTS)
        assert max(residual.norm() for residual in residuals) < 15 * random_values(NUMEL).norm()
    torch.testing.assert_close(received + residuals[0] + residuals[1], given, rtol=0, atol=1e-3)


@pytest.mark.parametrize("magnitude", [0.0, *MAGNITUDES[:-1], 1e36])
def test_any_magnitude(magnitude: float) -> None:
    codec = LowRankCodec(rank=4)
    for _ in range(3):
        decoded = step(codec, random_values(NUMEL, magnitude), SEGMENTS)
        assert decoded.isfinite().all()
        assert decoded.abs().max() <= 10 * magnitude
    for key, tensor in codec.state_dict().items():
        if key.endswith("basis"):
            torch.testing.assert_close(tensor.T @ tensor, torch.eye(4), rtol=0, atol=1e-5)


def test_gradients_in_the_last_rows_and_columns_are_seen_after_zeros() -> None:
    """After a gradient of zero the basis must not be the first unit vectors, which would never see these."""
    codec, values = LowRankCodec(rank=4), torch.zeros(60, 50)
    values[-5:, -5:] = low_rank_matrix(5, 5, 2)
    for _ in range(3):
        step(codec, torch.zeros(3000), WHOLE)
    step(codec, values.flatten(), WHOLE)
    torch.testing.assert_close(step(codec, values.flatten(), WHOLE), values.flatten(), rtol=0, atol=1e-4)


def test_restored_state_gives_the_same_bits() -> None:
    codec = LowRankCodec(rank=4)
    for number in range(3):
        step(codec, random_values(NUMEL, seed=number), SEGMENTS)
    file = io.BytesIO()
    torch.save(codec.state_dict(), file)
    file.seek(0)
    restored = LowRankCodec(rank=4)
    restored.load_state_dict(torch.load(file, weights_only=True))
    for number in range(3, 7):
        values = random_values(NUMEL, seed=number)
        assert torch.equal(step(codec, values, SEGMENTS), step(restored, values, SEGMENTS))
    assert codec.state_dict().keys() == restored.state_dict().keys()


def test_state_dict_is_a_snapshot() -> None:
    codec = LowRankCodec(rank=4)
    step(codec, random_values(NUMEL), SEGMENTS)
    state = codec.state_dict()
    before = {key: tensor.clone() for key, tensor in state.items()}
    step(codec, random_values(NUMEL, seed=1), SEGMENTS)
    assert all(torch.equal(state[key], before[key]) for key in state)


def test_bases_differ_by_name_and_agree_between_nodes() -> None:
    values = random_values(3000)
    first, again, other = (LowRankCodec(rank=4).encode(values, [Segment(name, 0, 60, 50)]) for name in ("a", "a", "b"))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


@pytest.mark.parametrize(
    ("segment", "rank"),
    [(Segment("w", 0, 50, 60), 4), (Segment("w", 50, 60, 50), 4), (Segment("v:0", 0, 60, 50), 4), (WHOLE[0], 3)],
)
def test_another_layout_starts_afresh(segment: Segment, rank: int) -> None:
    old = LowRankCodec(rank=4)
    step(old, random_values(3000), WHOLE)
    codec = LowRankCodec(rank)
    codec.load_state_dict(old.state_dict())
    values = random_values(3000, seed=1)
    assert torch.equal(step(codec, values, [segment]), step(LowRankCodec(rank), values, [segment]))


def test_nothing_at_all() -> None:
    assert step(LowRankCodec(), torch.zeros(0), []).numel() == 0
    assert step(LowRankCodec(), torch.zeros(0), [Segment("none", 0, 0, 5)]).numel() == 0


@pytest.mark.parametrize(
    ("rank", "error"), [(0, ValueError), (-3, ValueError), (2.5, TypeError), ("2", TypeError), (True, TypeError)]
)
def test_bad_rank_is_quoted_with_what_is_allowed(rank: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"rank={rank!r} must be an integer of at least 1"):
        LowRankCodec(rank=rank)
