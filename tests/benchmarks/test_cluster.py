"""The emulated cluster: nodes apart from each other, links at their rate, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.cluster import Cluster, ClusterRunError, unavailable_reason
from tests.helpers import require_cluster

ROOT = Path(__file__).parents[2]
HEADERS = 1514 / 1448  # Ethernet, IP and TCP with time stamps at an MTU of 1500

# The first rank of node 0 sends to that of node 1, which prints the seconds from its asking to the last byte.
TRANSFER = """
import os, socket, sys, time
size = int(sys.argv[1])
store = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["LOCAL_RANK"] != "0":
    pass
elif os.environ["RANK"] == "0":
    with socket.create_server(store) as server, server.accept()[0] as peer:
        peer.recv(1)
        peer.sendall(bytes(size))
else:
    while True:
        try:
            peer = socket.create_connection(store)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    start = time.monotonic()
    peer.sendall(b"?")
    while chunk := peer.recv(1 << 20):
        size -= len(chunk)
    assert size == 0
    print(time.monotonic() - start)
"""

ALL_REDUCE = """
import sys
import torch
import torch.distributed as dist
assert dist.is_torchelastic_launched()
dist.init_process_group("gloo")
tensor = torch.full((int(sys.argv[1]),), float(dist.get_rank() + 1))
dist.all_reduce(tensor)
assert torch.all(tensor == 10.0)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes of two ranks at 1000 Mbit/s."""
    require_cluster()
    with Cluster(nodes=2, ranks_per_node=2, rate_mbit=1000) as made:
        yield made


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Marks all processes started from now on; the function lists the names of those that live."""
    marker = f"CLUSTER_TEST_{uuid.uuid4().hex}"
    monkeypatch.setenv(marker, "1")

    def names() -> list[str]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if marker.encode() in (process / "environ").read_bytes():
                    found.append((process / "comm").read_text().strip())
            except OSError:  # it has ended since, or is ending
                continue
        return found

    return names


def wait_until(condition: Callable[[], bool], timeout: float = 20) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "out of time"
        time.sleep(0.05)


def transfer(cluster: Cluster, size: int) -> tuple[float, int]:
    """Seconds that ``size`` bytes take from node 0 to node 1, and the bytes that node 0 puts on the wire for it."""
    before = cluster.wire_bytes()[0]
    result = cluster.run([sys.executable, "-c", TRANSFER, str(size)], timeout_s=30)
    return float(result.outputs[2]), cluster.wire_bytes()[0] - before


@pytest.mark.root
def test_nodes_have_host_name_and_shared_memory_of_their_own(cluster: Cluster) -> None:
    script = """
    touch /dev/shm/rank$RANK
    until [ $(ls /dev/shm | wc -l) -ge $LOCAL_WORLD_SIZE ]; do sleep 0.01; done
    echo $(uname -n) $(ls /dev/shm)
    """
    outputs = cluster.run(["sh", "-c", script], timeout_s=20).outputs
    assert outputs == ("node0 rank0 rank1\n",) * 2 + ("node1 rank2 rank3\n",) * 2


@pytest.mark.root
def test_ranks_start_in_the_working_directory(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert set(cluster.run(["pwd"], timeout_s=20).outputs) == {f"{tmp_path}\n"}


@pytest.mark.root
def test_uneven_nodes_have_torchruns_variables() -> None:
    require_cluster()
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK ROLE_RANK MASTER_ADDR"
    with Cluster(nodes=2, ranks_per_node=[1, 2], rate_mbit=None) as cluster:
        result = cluster.run(["sh", "-c", "echo " + " ".join(f"${name}" for name in names.split())], timeout_s=20)
    assert result.outputs == (
        "0 3 0 1 0 0 0 10.77.0.1\n",
        "1 3 0 2 1 1 1 10.77.0.1\n",
        "2 3 1 2 1 1 2 10.77.0.1\n",
    )


@pytest.mark.root
def test_all_reduce_and_its_bytes(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "all_reduce.py"
    script.write_text(ALL_REDUCE)
    length, world_size = 2_000_000, 4
    cluster.set_rate(1000)
    before = cluster.wire_bytes()
    cluster.run([sys.executable, str(script), str(length)], timeout_s=60)
    after = cluster.wire_bytes()
    # In a flat ring each rank sends this much to its neighbour, and one rank of each node has it on another node.
    expected = 2 * (world_size - 1) / world_size * 4 * length * HEADERS
    assert {node: after[node] - before[node] for node in after} == pytest.approx({0: expected, 1: expected}, rel=0.05)


@pytest.mark.root
def test_links_keep_their_rate(cluster: Cluster) -> None:
    cluster.set_rate(100)
    seconds, sent = transfer(cluster, 20_000_000)
    assert sent == pytest.approx(20_000_000 * HEADERS, rel=0.01)
    assert 85 <= sent * 8 / seconds / 1e6 <= 102


@pytest.mark.root
def test_a_short_message_after_a_pause_is_no_faster_than_the_link(cluster: Cluster) -> None:
    before = cluster.wire_bytes()
    cluster.set_rate(50)
    assert cluster.wire_bytes() == before
    seconds, sent = transfer(cluster, 1_000_000)
    assert seconds >= 0.95 * sent * 8 / 50e6


@pytest.mark.root
def test_a_failing_rank_is_named_with_what_it_said(cluster: Cluster) -> None:
    script = "echo rank $RANK says $((6 * 7)); [ $RANK != 1 ] || exit 3"
    with pytest.raises(ClusterRunError, match=r"ranks \[1\] failed(.|\n)*rank 1 \(exit status 3\):\nrank 1 says 42"):
        cluster.run(["sh", "-c", script], timeout_s=20)


@pytest.mark.root
def test_peers_of_a_failing_rank_are_ended(cluster: Cluster) -> None:
    script = "[ $RANK != 1 ] || exit 3; sleep 300"
    start = time.monotonic()
    result = cluster.run(["sh", "-c", script], timeout_s=100, check=False)
    assert time.monotonic() - start < 50
    assert result.returncodes == (-signal.SIGKILL, 3, -signal.SIGKILL, -signal.SIGKILL)
    assert result.stopped == (0, 2, 3)
    assert not result.timed_out


@pytest.mark.root
def test_the_time_out_ends_ranks_and_their_children(cluster: Cluster, marked: Callable[[], list[str]]) -> None:
    command = ["sh", "-c", "echo here; sleep 300 & sleep 300"]
    with pytest.raises(ClusterRunError, match=r"out of time after 1 s(.|\n)*rank 3 \(stopped\):\nhere"):
        cluster.run(command, timeout_s=1)
    wait_until(lambda: not marked())
    assert cluster.run(command, timeout_s=1, check=False).timed_out


@pytest.mark.root
def test_nothing_is_left_when_the_parent_is_killed(marked: Callable[[], list[str]]) -> None:
    require_cluster()
    interfaces = sorted(Path("/sys/class/net").iterdir())
    source = (
        "from benchmarks.cluster import Cluster\n"
        "with Cluster(nodes=2, ranks_per_node=2, rate_mbit=100) as cluster:\n"
        "    cluster.run(['sh', '-c', 'sleep 300 & setsid sleep 300 & sleep 300'], timeout_s=300)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", source], cwd=ROOT)
    try:
        wait_until(lambda: marked().count("sleep") == 12)
        assert sorted(Path("/sys/class/net").iterdir()) == interfaces
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not marked())
    assert sorted(Path("/sys/class/net").iterdir()) == interfaces


@pytest.mark.root
def test_command_line() -> None:
    require_cluster()
    command = [sys.executable, "benchmarks/cluster.py", "--ranks-per-node", "1", "2", "--", "sh", "-c"]
    script = "echo from $RANK; [ $LOCAL_RANK = 0 ]"
    failing = subprocess.run([*command, script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (failing.returncode, failing.stdout) == (1, "from 0\n")
    assert "--- rank 2 (exit status 1):\nfrom 2" in failing.stderr
    passing = subprocess.run([*command, "true"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (passing.returncode, passing.stderr) == (0, "")
    assert "node 1 sent" in passing.stdout


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in (unavailable_reason() or "")


@pytest.mark.root
def test_without_its_tools_it_names_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    require_cluster()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "unshare" in (unavailable_reason() or "")


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "rate_mbit"),
    [(0, 1, None), (2, 0, None), (2, [1], None), (2, [1, 0], None), (2, 1, 0), (2, 1, -5)],
)
def test_numbers_out_of_range_are_refused(nodes: int, ranks_per_node: int | list[int], rate_mbit: float | None) -> None:
    with pytest.raises(ValueError, match=r"nodes=|rate_mbit="):
        Cluster(nodes=nodes, ranks_per_node=ranks_per_node, rate_mbit=rate_mbit)
