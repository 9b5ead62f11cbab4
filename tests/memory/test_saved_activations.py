from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lightning_hpc.memory import SavedActivations

FLOAT = 4


def weight(rows: int, columns: int) -> Tensor:
    return torch.ones(rows, columns, requires_grad=True)


def test_each_saved_tensor_counts_until_its_node_has_run() -> None:
    first, second = weight(3, 5), weight(5, 7)
    x = torch.ones(2, 3)
    live = []
    with SavedActivations([first, second, x]) as saved:
        hidden = (x @ first).exp()  # saved as the result of exp, and as the input of the next product
        outputs = (hidden @ second).sin()  # its input is saved
        hidden.register_hook(lambda _: live.append(saved.live_bytes))
        del hidden
        assert saved.live_bytes == (2 * 5 + 2 * 7) * FLOAT
        outputs.sum().backward()
    assert live == [2 * 5 * FLOAT]
    assert saved.live_bytes == 0
    assert saved.peak_bytes == (2 * 5 + 2 * 7) * FLOAT


def test_a_view_keeps_all_of_its_storage_once() -> None:
    base = torch.ones(10, 4)
    factors = weight(2, 4)
    with SavedActivations([factors]) as saved:
        loss = (base[2:4] * factors).sum() + (base[6:8] * factors).sum() + (base.view(-1)[:8] * factors.view(-1)).sum()
        assert saved.live_bytes == 40 * FLOAT
        del loss
        assert saved.live_bytes == 0


def test_storages_that_live_one_after_the_other_do_not_add_up() -> None:
    factors = weight(100, 1)
    with SavedActivations([factors]) as saved:
        for _ in range(5):
            (torch.rand(100, 1) * factors).sum().backward()
        assert saved.peak_bytes == 100 * FLOAT
        losses = [(torch.rand(100, 1) * factors).sum() for _ in range(5)]
        assert saved.peak_bytes == 500 * FLOAT
        del losses
    assert saved.live_bytes == 0


def test_bytes_stay_while_the_graph_is_retained() -> None:
    factors = weight(4, 4)
    with SavedActivations([factors]) as saved:
        loss = (torch.ones(4, 4) * factors).sum()
        loss.backward(retain_graph=True)
        assert saved.live_bytes == 16 * FLOAT
        loss.backward()
        assert saved.live_bytes == 0


def test_casts_of_autocast_count_and_parameters_do_not() -> None:
    layer = nn.Linear(8, 4, bias=False)
    x = torch.ones(2, 8)
    with SavedActivations([*layer.parameters(), x]) as saved:
        layer(x).sum()
        assert saved.peak_bytes == 0
        with torch.autocast("cpu", torch.bfloat16):
            loss = layer(x.requires_grad_()).sum()
        assert saved.live_bytes == (2 * 8 + 8 * 4) * 2
        loss.backward()
    assert saved.live_bytes == 0


def test_an_output_saved_by_its_own_node_is_freed_with_the_graph() -> None:
    with SavedActivations() as saved:
        x = weight(3, 3)
        y = x.exp()
        assert saved.live_bytes == 9 * FLOAT
        del y
        assert saved.live_bytes == 0


def test_sparse_tensors_count_with_all_their_parts() -> None:
    sparse = torch.eye(3).to_sparse_coo()
    with SavedActivations() as saved:
        loss = torch.sparse.mm(sparse, weight(3, 2)).sum()
        assert saved.live_bytes >= 3 * FLOAT + 2 * 3 * 8
        loss.backward()
    assert saved.live_bytes == 0


def test_a_custom_function_counts() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x, x * x)
            return x**3

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] * 3 * ctx.saved_tensors[1]

    x = weight(5, 1)
    with SavedActivations([x]) as saved:
        loss = Cube.apply(x).sum()
        assert saved.live_bytes == 5 * FLOAT
        loss.backward()
    assert torch.equal(x.grad if x.grad is not None else x, torch.full((5, 1), 3.0))


def test_gradients_are_those_of_a_run_that_nobody_measures() -> None:
    def gradients() -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.LSTM(6, 3)
        )
        outputs, _ = model(torch.randn(2, 2, 8))
        F.mse_loss(outputs, torch.zeros_like(outputs)).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plain = gradients()
    with SavedActivations():
        measured = gradients()
    assert all(map(torch.equal, plain, measured))


def test_a_saved_tensor_that_was_changed_is_an_error_as_without_measuring() -> None:
    x = torch.ones(4, 4)
    with SavedActivations():
        loss = (x * weight(4, 4)).sum()
        x.add_(1)
        with pytest.raises(RuntimeError, match=r"shape \(4, 4\) .* was changed in place"):
            loss.backward()
