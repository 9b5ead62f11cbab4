import copy
import gc
import inspect
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hpc.memory import CheckpointedBlocks, SavedActivations, block_call, checkpointed_blocks, find_blocks
from tests.memory.block_models import IN_PLACE, MODELS, Residual, equal, inputs, make, state, train


def checkpointed(model: nn.Module) -> CheckpointedBlocks:
    return CheckpointedBlocks(find_blocks(model).modules)


@pytest.mark.parametrize("name", MODELS)
def test_losses_gradients_state_and_random_numbers_are_bitwise_those_without(name: str) -> None:
    plain, other = make(name), make(name)
    with checkpointed(other) as blocks:
        for step in range(4):
            blocks.checkpoint(blocks.names[: len(blocks.names) - step % 2])
            results = []
            for model in (plain, other):
                torch.manual_seed(step)
                results.append((train(model, inputs(name, step)), state(model), torch.get_rng_state()))
            assert equal(*results)
    assert blocks.refused == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_in_forward_is_that_of_the_recomputation(dtype: torch.dtype) -> None:
    plain, other = make("attention"), make("attention")
    with checkpointed(other):
        results = []
        for model in (plain, other):
            torch.manual_seed(0)
            with torch.autocast("cpu", dtype):
                loss = model(inputs("attention")).square().mean()
            loss.backward()  # outside of autocast
            results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert equal(*results)


def test_double_backward_and_two_backwards_through_one_graph() -> None:
    results = []
    for is_checkpointed in (False, True):
        model = make("power_iterating")
        with checkpointed(model) as blocks:
            blocks.checkpoint(blocks.names if is_checkpointed else ())
            x = inputs("power_iterating").requires_grad_()
            loss = model(x).sum()
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            gradient.square().sum().backward(retain_graph=True)
            loss.backward()
            results.append([gradient.detach(), *(parameter.grad for parameter in model.parameters())])
    assert equal(*results)


def test_a_block_that_changes_its_input_is_right_once_and_refused_from_then_on() -> None:
    torch.manual_seed(0)
    plain = IN_PLACE()
    other = copy.deepcopy(plain)
    with CheckpointedBlocks(find_blocks(other, ["Residual", "InPlace"]).modules) as blocks:
        for step in range(3):
            results = [train(model, inputs("in_place", step)) for model in (plain, other)]
            assert equal(*results)
        assert blocks.refused == {"1.2": "it changes its input in place"}
        assert blocks.names == blocks.checkpointed == ["1.0", "1.1", "1.3"]
        with pytest.raises(ValueError, match=r"block '1\.2' cannot be checkpointed: it changes its input in place"):
            blocks.checkpoint(["1.2"])
        with pytest.raises(ValueError, match=r"block 'x' cannot be checkpointed: the blocks are 1\.0, "):
            blocks.checkpoint(["x"])


def test_an_input_that_others_change_is_an_error() -> None:
    model = make("residual")
    with checkpointed(model):
        hidden = model[0](inputs("residual"))
        loss = model[1](hidden).sum()
        with torch.no_grad():
            hidden.add_(1)
        with pytest.raises(RuntimeError, match=r"an input of shape \(6, 5, 8\) of block '1\.0' was changed in place"):
            loss.backward()


def test_a_buffer_that_is_changed_only_later_is_an_error() -> None:
    class Late(Residual):
        is_late = False

        def forward(self, x: Tensor) -> Tensor:
            if self.is_late:
                self.total.add_(1)
            return super().forward(x) + self.total

    model = nn.Sequential(Late(), Late())
    for block in model:
        block.register_buffer("total", torch.zeros(()))
    with checkpointed(model):
        train(model, inputs("residual"))
        model[1].is_late = True
        with pytest.raises(RuntimeError, match="block '1' has begun to change a buffer"):
            train(model, inputs("residual"))


def test_batch_normalisation_may_thaw_later() -> None:
    plain, other = make("normalised"), make("normalised")
    with checkpointed(other):
        for is_training in (False, True):
            results = [
                (train(model.train(is_training), inputs("normalised")), state(model)) for model in (plain, other)
            ]
            assert equal(*results)


def test_bytes_are_saved_only_where_autograd_records() -> None:
    model = make("residual")
    calls: list[bool] = []
    model[1][0].norm.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    with checkpointed(model):
        with torch.no_grad():
            model(inputs("residual"))
        assert calls == [False]
        train(model, inputs("residual"))
        assert calls == [False, True, True]


def test_without_autograd_forward_is_called_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("residual")
    with checkpointed(model), torch.no_grad():
        monkeypatch.setattr(checkpointed_blocks, "BlockCall", None)
        model(inputs("residual"))


def test_random_states_of_the_devices_of_nested_and_named_inputs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []

    def check(function: Any, *tokens: Tensor, **_: Any) -> None:
        devices.extend(token.device.type for token in tokens)

    monkeypatch.setattr(block_call, "checkpoint", check)
    model = make("structured")
    x = torch.ones(1)
    with CheckpointedBlocks({"block": model.blocks[0]}):
        model.blocks[0]((x, x.to("meta")), more={"mask": x})
    assert devices == ["cpu", "meta"]


def test_hooks_of_the_block_run_once_and_other_methods_stay() -> None:
    model = make("residual")
    calls: list[str] = []
    model[1][0].register_forward_hook(lambda *_: calls.append("forward"))
    model[1][0].register_full_backward_hook(lambda *_: calls.append("backward"))
    with checkpointed(model):
        train(model, inputs("residual"))
    assert calls == ["forward", "backward"]


def test_names_types_and_state_stay_and_forward_comes_back() -> None:
    model, block = make("residual"), Residual()
    before = [list(model.state_dict()), [(name, type(module)) for name, module in model.named_modules()]]
    with checkpointed(model):
        assert before == [list(model.state_dict()), [(name, type(module)) for name, module in model.named_modules()]]
        assert inspect.signature(model[1][0].forward) == inspect.signature(block.forward)
        assert model[1][0].forward != block.forward
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_deep_copy_works_by_itself_and_a_pickled_one_is_plain() -> None:
    model = make("dropout")
    expected = train(copy.deepcopy(model).eval(), inputs("dropout"))
    with checkpointed(model):
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (copied, pickled):
        assert other[1][0].forward.__self__ is other[1][0]
        with torch.no_grad():
            model[1][0].mlp[0].weight.zero_()
        assert equal(train(other.eval(), inputs("dropout")), expected)


def test_a_copy_is_checkpointed_as_long_as_the_original() -> None:
    model = make("dropout")
    saved_bytes = []
    with checkpointed(model):
        copied = copy.deepcopy(model)
        for _ in range(2):
            with SavedActivations(copied.parameters()) as saved:
                copied(inputs("dropout"))
            saved_bytes.append(saved.peak_bytes)
            copied[1][0].forward.__func__.is_on = False
    assert saved_bytes[0] < saved_bytes[1]


def test_a_forward_that_was_replaced_before_or_after_stays_in_force() -> None:
    model = make("residual")
    seen: list[str] = []

    def patch(block: nn.Module, word: str) -> Any:
        inner = block.forward

        def forward(x: Tensor) -> Tensor:
            seen.append(word)
            return inner(x)

        block.forward = forward
        return forward

    before = patch(model[1][0], "before")
    blocks = checkpointed(model)
    after = patch(model[1][1], "after")
    train(model, inputs("residual"))
    assert seen == ["before", "after", "before"]
    blocks.remove()
    assert (model[1][0].forward, model[1][1].forward) == (before, after)
    seen.clear()
    train(model, inputs("residual"))
    assert seen == ["before", "after"]


def test_the_graph_is_freed_without_the_garbage_collector() -> None:
    model = make("residual")
    with checkpointed(model):
        train(model, inputs("residual"))
        gc.collect()
        gc.disable()
        try:
            hidden = model[0](inputs("residual"))
            kept = weakref.ref(hidden.untyped_storage())
            loss = model[1](hidden).sum()
            del hidden
            assert kept() is not None
            loss.backward()
            assert kept() is None
            hidden = model[0](inputs("residual"))
            kept = weakref.ref(hidden.untyped_storage())
            model[1](hidden).sum()
            del hidden
            assert kept() is None
        finally:
            gc.enable()


def test_an_error_in_a_block_is_passed_on_as_it_is() -> None:
    model = make("residual")
    with checkpointed(model), pytest.raises(RuntimeError, match="normalized_shape"):
        model[1][0](torch.ones(3, 5))
