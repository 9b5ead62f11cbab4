"""Which files belong to which checkpoint, without any process."""

import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_hpc.comm.codecs import make_codec
from lightning_hpc.comm.hook import GradientReducer
from lightning_hpc.comm.topology import Topology
from lightning_hpc.strategies.codec_checkpoint import load_codec_state, make_stamp, remove_codec_state, save_codec_state

TOPOLOGY = Topology.from_lists([[0], [1]])
CODECS = [make_codec("int8")]


class FakeReducer:
    """Holds a number."""

    def __init__(self, number: float) -> None:
        self.number: float | None = number

    def state_dict(self) -> dict[str, Any]:
        return {"int8": {"residuals": {"0:weight": torch.tensor([self.number])}}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = float(state["int8"]["residuals"]["0:weight"]) if state else None


class FakeStrategy:
    """One rank, which always agrees with itself."""

    checkpoint_io = TorchCheckpointIO()

    def reduce_boolean_decision(self, decision: bool, all: bool) -> bool:  # noqa: A002
        return decision


def save(path: str, number: float, step: int = 1) -> None:
    """As `HPCStrategy.save_checkpoint` does."""
    checkpoint = {"global_step": step}
    reducer = cast(GradientReducer, FakeReducer(number))
    save_codec_state(
        reducer.state_dict(),
        make_stamp(TOPOLOGY, CODECS, checkpoint["global_step"]),
        0,
        checkpoint,
        path,
        FakeStrategy.checkpoint_io,
    )
    FakeStrategy.checkpoint_io.save_checkpoint(checkpoint, path)


def load(path: str) -> float | None:
    reducer = FakeReducer(0.0)
    checkpoint = FakeStrategy.checkpoint_io.load_checkpoint(path, weights_only=True)
    stamp = make_stamp(TOPOLOGY, CODECS, checkpoint["global_step"])
    load_codec_state(cast(GradientReducer, reducer), stamp, 0, checkpoint, path, cast(Any, FakeStrategy()))
    return reducer.number


@pytest.fixture
def link(tmp_path: Path) -> str:
    """A link to a checkpoint, as ``ModelCheckpoint(save_last="link")`` makes it."""
    save(str(tmp_path / "best.ckpt"), 1.0)
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    return str(tmp_path / "last.ckpt")


def test_a_link_has_the_state_of_what_it_points_to(link: str) -> None:
    assert load(link) == 1.0


def test_a_relative_path_and_one_through_a_linked_folder_find_it(
    tmp_path: Path, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").symlink_to(tmp_path)
    assert load(str(tmp_path / "elsewhere" / "last.ckpt")) == 1.0
    monkeypatch.chdir(tmp_path)
    assert load("best.ckpt") == 1.0
    save("here.ckpt", 2.0)
    assert load(str(tmp_path / "here.ckpt")) == 2.0


def test_saving_over_a_link_replaces_it_and_leaves_what_it_pointed_to(tmp_path: Path, link: str) -> None:
    save(link, 2.0, step=2)
    assert not os.path.islink(link)  # noqa: PTH114
    assert load(link) == 2.0
    assert load(str(tmp_path / "best.ckpt")) == 1.0


def test_removing_a_link_leaves_what_it_pointed_to(tmp_path: Path, link: str) -> None:
    # On another node the link may still be there when rank 0 is about to remove it.
    remove_codec_state(link, FakeStrategy.checkpoint_io)
    assert load(str(tmp_path / "best.ckpt")) == 1.0
    remove_codec_state(str(tmp_path / "best.ckpt"), FakeStrategy.checkpoint_io)
    with pytest.warns(UserWarning, match="not all ranks found their file of step 1"):
        assert load(str(tmp_path / "best.ckpt")) is None
    remove_codec_state(str(tmp_path / "best.ckpt"), FakeStrategy.checkpoint_io)  # another node was faster


def test_a_checkpoint_of_an_exact_run_has_no_state(tmp_path: Path) -> None:
    path = str(tmp_path / "exact.ckpt")
    FakeStrategy.checkpoint_io.save_checkpoint({"global_step": 1}, path)
    assert load(path) is None


def test_a_url_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    save("memory://run/best.ckpt", 3.0)
    assert load("memory://run/best.ckpt") == 3.0
    remove_codec_state("memory://run/best.ckpt", FakeStrategy.checkpoint_io)
    with pytest.warns(UserWarning, match="memory://run/codec_state/best.ckpt"):
        assert load("memory://run/best.ckpt") is None
