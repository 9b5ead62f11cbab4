from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_hpc.comm import rank_facts
from lightning_hpc.comm.hardware import Hardware
from lightning_hpc.comm.rank_facts import RankFacts, hosts_of, read_facts

FACTS = RankFacts("box", "boot", "net:[1]", "eth0", None, "", Hardware())


def visible(groups: list[list[int]]) -> list[list[bool]]:
    """Who sees whose file when each group shares its memory."""
    count = sum(map(len, groups))
    return [[any({a, b} <= set(group) for group in groups) for b in range(count)] for a in range(count)]


def test_ranks_that_see_each_others_files_share_a_host_whatever_its_name() -> None:
    facts = [replace(FACTS, host=name) for name in ("a", "b", "a", "b")]
    assert hosts_of(facts, [True] * 4, visible([[0, 1], [2, 3]])) == [0, 0, 2, 2]


def test_containers_with_one_name_and_memory_of_their_own_are_apart() -> None:
    assert hosts_of([FACTS] * 3, [True] * 3, visible([[0], [1], [2]])) == [0, 1, 2]


def test_without_shared_memory_the_name_alone_is_not_enough() -> None:
    facts = [FACTS, replace(FACTS, network="net:[2]"), FACTS, replace(FACTS, machine="other")]
    assert hosts_of(facts, [False] * 4, visible([[0], [1], [2], [3]])) == [0, 1, 0, 3]


def _interfaces(root: Path, speeds: dict[str, str], *, physical: bool = True) -> None:
    for name, speed in speeds.items():
        (root / name).mkdir()
        (root / name / "speed").write_text(speed)
        if physical:
            (root / name / "device").mkdir()


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A device tree in which every interface has an address."""
    monkeypatch.setattr(rank_facts, "_NET", tmp_path)
    monkeypatch.setattr(rank_facts, "_address", lambda name: f"address of {name}")
    return tmp_path


def test_a_faster_interface_that_is_up_is_seen(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _interfaces(net, {"eth0": "1000\n", "ib0": "100000\n", "ib1": "-1\n"})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    facts = read_facts(torch.device("cpu"))
    assert (facts.interface, facts.interface_mbit, facts.faster_interface) == ("eth0", 1000, "ib0")


def test_virtual_interfaces_claim_any_speed(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _interfaces(net, {"eth0": "100\n"})
    _interfaces(net, {"veth1": "10000\n"}, physical=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert read_facts(torch.device("cpu")).faster_interface == ""


def test_without_the_variable_it_is_the_one_on_the_way_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert read_facts(torch.device("cpu")).interface == "lo"


def test_an_address_that_does_not_resolve_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    assert read_facts(torch.device("cpu")).interface == ""
