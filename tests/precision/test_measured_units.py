import pytest
import torch

from lightning_hpc.precision.measured_units import measured_units
from lightning_hpc.precision.unit_bytes import UnitBytes
from tests.memory.block_models import equal, inputs, make, train


def test_units_are_measured_once_and_nothing_is_left_on_them() -> None:
    model, plain = make("residual"), make("residual")
    x = inputs("residual")
    with measured_units(model) as found:
        result = train(model, x)
        assert found == {}
    assert equal(result, train(plain, x))
    assert all("forward" not in vars(module) for module in model.modules())
    assert list(found) == ["0", "1.0", "1.1", "1.2", "1.3"]
    assert all(each.inputs == x.numel() and each.plain == 2 * each.low > 0 for each in found.values())
    assert found["1.3"].plain > found["1.0"].plain


def test_an_error_leaves_nothing_behind_and_tells_what_was_measured() -> None:
    model = make("residual")

    def fail(*_: object) -> None:
        raise MemoryError

    model[1][2].register_forward_pre_hook(fail)
    with pytest.raises(MemoryError), measured_units(model) as found:
        train(model, inputs("residual"))
    assert list(found) == ["0", "1.0", "1.1"]
    assert all("forward" not in vars(module) for module in model.modules())
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.mark.parametrize(("low", "is_useless"), [(100, True), (120, True), (99.5, True), (98, False), (50, False)])
def test_less_than_a_hundredth_is_useless(low: float, is_useless: bool) -> None:
    unit = UnitBytes(1000, int(10 * low), 1)
    assert unit.saving == 1000 - int(10 * low)
    assert unit.is_useless == is_useless
