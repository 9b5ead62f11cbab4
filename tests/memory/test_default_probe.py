import pytest
import torch

from lightning_hpc.memory import CudaProbe, HostProbe, default_probe


def test_each_device_gets_its_probe() -> None:
    assert isinstance(default_probe(torch.device("cuda", 0)), CudaProbe)
    assert isinstance(default_probe(torch.device("cpu")), HostProbe)


def test_a_device_that_nobody_knows_is_told_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"memory of 'mps'; give CallableProbe"):
        default_probe(torch.device("mps"))
