"""Several "nodes" on one machine, joined by links of a chosen speed.

python benchmarks/cluster.py --nodes 2 --ranks-per-node 2 --rate-mbit 200 -- python train.py

Each node has network, host name and /dev/shm of its own. A node lives as long as its *holder*, a process in fresh
namespaces that waits at a pipe whose other end this process holds: when this process ends, in whatever way, the holders
end, and with them the namespaces and the links between them. So nothing is left behind, and nothing of the host's own
network is touched. One more holder, the hub, has the bridge that the links meet at; `tc tbf` shapes both ends of each.

Linux with root, iproute2 and util-linux.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

_TOOLS = ("unshare", "nsenter", "setpriv", "ip", "tc", "mount")
_INTERFACE = "eth0"
_SUBNET = "10.77.0"
_PORT = 29500
# tbf lets a burst pass at once, and the kernel hands it packets of up to 64 KiB; a queue of some 100 ms at any rate
# keeps TCP from losing packets, so that the link's speed and not TCP's recovery is measured.
_BURST_BYTES = 128 * 1024
_QUEUE_SECONDS = 0.1
_GRACE_SECONDS = 10.0
_TAIL_LINES = 30


class ClusterUnavailableError(RuntimeError):
    """This machine cannot emulate a cluster; the message says what is missing."""


class ClusterRunError(RuntimeError):
    """A rank failed, or the run was out of time. The message ends with each rank's last lines."""


@dataclass(frozen=True)
class RunResult:
    """What the ranks left behind, by rank.

    Attributes:
        returncodes: Exit statuses; negative is the signal that ended the rank.
        outputs: Standard output and standard error, together.
    """

    returncodes: tuple[int, ...]
    outputs: tuple[str, ...]


def unavailable_reason() -> str | None:
    """Why no cluster can be made here, or None if one can."""
    if not sys.platform.startswith("linux"):
        return f"an emulated cluster needs Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "an emulated cluster needs root, to make network namespaces"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"an emulated cluster needs {', '.join(missing)} (packages iproute2 and util-linux)"
    probe = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", *_shape(100.0)]
    failed = subprocess.run(probe, capture_output=True, text=True)
    return f"this kernel refuses a namespace with a tbf queue: {failed.stderr.strip()}" if failed.returncode else None


class Cluster:
    """Emulated nodes; a context manager.

    Args:
        nodes: Number of nodes, at most 250.
        ranks_per_node: Ranks on each node, or on all of them.
        rate_mbit: Speed of each node's link in both directions, in Mbit/s; None leaves it unshaped.

    Raises:
        ValueError: If a number is not positive, or ``ranks_per_node`` is not one number a node.
        ClusterUnavailableError: If this machine cannot emulate a cluster.
    """

    def __init__(self, *, nodes: int, ranks_per_node: int | Sequence[int], rate_mbit: float | None) -> None:
        ranks = [ranks_per_node] * nodes if isinstance(ranks_per_node, int) else list(ranks_per_node)
        if not 1 <= nodes <= 250 or len(ranks) != nodes or min(ranks) < 1:
            raise ValueError(
                f"nodes={nodes} with ranks_per_node={ranks_per_node}: give 1 to 250 nodes and a positive number of"
                " ranks for all, or one for each"
            )
        reason = unavailable_reason()
        if reason is not None:
            raise ClusterUnavailableError(reason)
        self._node_of_rank = [node for node, count in enumerate(ranks) for _ in range(count)]
        self._rate_mbit = rate_mbit
        self._resources = ExitStack()
        self._nodes: list[_Holder] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._hub = stack.enter_context(_Holder("hub"))
            self._hub.call("ip", "link", "add", "bridge0", "type", "bridge")
            self._hub.call("ip", "link", "set", "bridge0", "up")
            for index in range(max(self._node_of_rank) + 1):
                self._nodes.append(stack.enter_context(_Holder(f"node{index}")))
                self._connect(index)
            self.set_rate(self._rate_mbit)
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._node_of_rank)

    def set_rate(self, rate_mbit: float | None) -> None:
        """Shapes both ends of every link to ``rate_mbit``; None lifts the limit. Restarts `wire_bytes` at 0."""
        if rate_mbit is not None and not 0 < rate_mbit <= 100_000:
            raise ValueError(f"rate_mbit={rate_mbit} must be a positive number of Mbit/s, or None")
        # A queue that only counts, where nothing is to be shaped.
        queue = _shape(rate_mbit) if rate_mbit is not None else ["pfifo", "limit", "10000"]
        for index, node in enumerate(self._nodes):
            for holder, device in ((node, _INTERFACE), (self._hub, f"node{index}")):
                subprocess.run(holder.inside("tc", "qdisc", "del", "dev", device, "root"), capture_output=True)
                holder.call("tc", "qdisc", "add", "dev", device, "root", *queue)

    def wire_bytes(self) -> dict[int, int]:
        """Bytes that each node has sent since the last `set_rate`, all headers up to Ethernet's included."""
        return {index: self._sent(node) for index, node in enumerate(self._nodes)}

    def run(self, command: Sequence[str], *, timeout_s: float, stream: bool = False, check: bool = True) -> RunResult:
        """Runs ``command`` on every rank, with the environment that torchrun would give it.

        Args:
            command: Program and arguments.
            timeout_s: Seconds until all ranks are ended.
            stream: Whether rank 0's output is also printed as it comes.
            check: Whether a failing rank raises.

        Raises:
            ClusterRunError: If the run was out of time, or a rank failed and ``check`` is set.
        """
        ranks = [self._start(rank, command, stream and rank == 0) for rank in range(self.world_size)]
        try:
            in_time = _wait(ranks, time.monotonic() + timeout_s)
        finally:
            for rank in ranks:
                rank.end()
        result = RunResult(tuple(rank.returncode for rank in ranks), tuple(rank.output for rank in ranks))
        if not in_time:
            raise ClusterRunError(f"out of time after {timeout_s:g} s{_tails(result)}")
        if check and any(result.returncodes):
            failed = [rank for rank, code in enumerate(result.returncodes) if code]
            raise ClusterRunError(f"ranks {failed} failed{_tails(result)}")
        return result

    def _connect(self, index: int) -> None:
        node = self._nodes[index]
        peer = ("peer", "name", _INTERFACE, "netns", str(node.pid))
        self._hub.call("ip", "link", "add", f"node{index}", "type", "veth", *peer)
        self._hub.call("ip", "link", "set", f"node{index}", "master", "bridge0", "up")
        node.call("ip", "address", "add", f"{_SUBNET}.{index + 1}/24", "dev", _INTERFACE)
        node.call("ip", "link", "set", _INTERFACE, "up")

    def _sent(self, node: "_Holder") -> int:
        queues = json.loads(node.call("tc", "-s", "-j", "qdisc", "show", "dev", _INTERFACE))
        return sum(int(queue["bytes"]) for queue in queues if queue.get("root"))

    def _start(self, rank: int, command: Sequence[str], stream: bool) -> "_Rank":
        node = self._node_of_rank[rank]
        local_rank = rank - self._node_of_rank.index(node)
        environment = {
            "MASTER_ADDR": f"{_SUBNET}.1",
            "MASTER_PORT": str(_PORT),
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self._node_of_rank.count(node)),
            "GROUP_RANK": str(node),
            "NODE_RANK": str(node),
            "ROLE_RANK": str(rank),
            "TORCHELASTIC_RUN_ID": "emulated",  # makes torch and Lightning take this for torchrun
            "TORCHELASTIC_RESTART_COUNT": "0",
            "GLOO_SOCKET_IFNAME": _INTERFACE,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        return _Rank(self._nodes[node].inside("setpriv", "--pdeathsig", "KILL", *command), environment, stream)


class _Holder:
    """A process that keeps one node's namespaces alive."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> Self:
        script = (
            f"hostname {self._name} && mount -t tmpfs -o mode=1777 tmpfs /dev/shm && ip link set lo up"
            " && echo ready && exec cat"
        )
        self._process = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an interrupt at the terminal is for us, and we end the holders
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            self.__exit__(None, None, None)
            raise ClusterUnavailableError(f"could not make the namespaces of {self._name}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=_GRACE_SECONDS)
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def inside(self, *command: str) -> list[str]:
        """The command that runs ``command`` on this node."""
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", *command]

    def call(self, *command: str) -> str:
        """Runs a short command on this node and returns its output."""
        done = subprocess.run(self.inside(*command), capture_output=True, text=True)
        if done.returncode:
            raise ClusterUnavailableError(f"{' '.join(command)!r} failed on {self._name}: {done.stderr.strip()}")
        return done.stdout


class _Rank:
    """A running rank; a thread drains its output, so that it never waits for us."""

    def __init__(self, command: list[str], environment: dict[str, str], stream: bool) -> None:
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that its own children can be ended with it
        )
        self._stream = stream
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        return self._process.poll()

    def end(self) -> None:
        """Ends the rank and all that it has started in its session."""
        with suppress(ProcessLookupError):  # it has ended, and its children with it
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=_GRACE_SECONDS)

    @property
    def returncode(self) -> int:
        return int(self._process.returncode)

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if self._stream:
                print(line, end="", flush=True)


def _wait(ranks: list[_Rank], deadline: float) -> bool:
    """Waits until all ranks have ended, or some seconds longer than the first failure; False if out of time."""
    failed_at: float | None = None
    while True:
        codes = [rank.poll() for rank in ranks]
        if None not in codes:
            return True
        now = time.monotonic()
        if failed_at is None and any(codes):
            failed_at = now
        if failed_at is not None and now > failed_at + _GRACE_SECONDS:
            return True
        if now > deadline:
            return False
        time.sleep(0.02)


def _shape(rate_mbit: float) -> list[str]:
    limit = int(rate_mbit * 1e6 / 8 * _QUEUE_SECONDS) + 4 * _BURST_BYTES
    return ["tbf", "rate", f"{rate_mbit * 1000:.0f}kbit", "burst", str(_BURST_BYTES), "limit", str(limit)]


def _tails(result: RunResult) -> str:
    tails = ("\n".join(output.splitlines()[-_TAIL_LINES:]) for output in result.outputs)
    return "".join(
        f"\n--- rank {rank} (exit status {code}):\n{tail}"
        for rank, (code, tail) in enumerate(zip(result.returncodes, tails, strict=True))
    )


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog=f"python {Path(__file__).name}"
    )
    parser.add_argument("--nodes", type=int, default=2, help="number of nodes (default: %(default)s)")
    parser.add_argument(
        "--ranks-per-node", type=int, nargs="+", default=[2], help="for all nodes, or one number a node (default: 2)"
    )
    parser.add_argument("--rate-mbit", type=float, help="speed of each node's link in Mbit/s (default: unshaped)")
    parser.add_argument("--timeout-s", type=float, default=600, help="seconds until ranks end (default: %(default)s)")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND", help="what every rank runs; rank 0's output shows")
    arguments = parser.parse_args()
    counts = arguments.ranks_per_node
    ranks = counts[0] if len(counts) == 1 else counts
    try:
        with Cluster(nodes=arguments.nodes, ranks_per_node=ranks, rate_mbit=arguments.rate_mbit) as cluster:
            cluster.run(arguments.command, timeout_s=arguments.timeout_s, stream=True)
            for node, sent in cluster.wire_bytes().items():
                print(f"node {node} sent {sent / 1e6:.2f} MB")
    except (ValueError, ClusterUnavailableError, ClusterRunError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
