r"""Several "nodes" on one machine, joined by links of a chosen speed.

.venv/bin/python benchmarks/cluster.py --nodes 2 --ranks-per-node 2 --rate-mbit 200 -- \
    .venv/bin/python examples/language_model.py fit --config examples/language_model.yaml \
    --trainer.strategy=hpc --trainer.num_nodes=2 --trainer.devices=2 --trainer.max_steps=20

What it runs is what `torchrun` would run on each rank: a Trainer needs ``num_nodes`` and ``devices`` to match.

Each node has network, host name, process numbers and /dev/shm of its own. A node lives as long as its *holder*, the
first process in fresh namespaces, which reads a pipe whose other end this process holds. When this process ends, in
whatever way, the holders end, and the kernel ends all processes of their nodes and removes the links. So nothing is
left behind, and nothing of the host's own network is touched. One more holder, the hub, has the bridge that the links
meet at; `tc tbf` shapes both ends of each.

Linux with root, iproute2 and util-linux.
"""

import argparse
import codecs
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Self

_INTERFACE = "eth0"
_PORT = 29500  # torchrun's
_GRACE_S = 5.0
_POLL_S = 0.05
_TAIL_LINES = 30

# What a link lets through at once after a pause: 1 ms at its rate, so that a timer that fires late loses nothing, and
# never less than one of the packets that TCP hands over whole, which are kept small for that. With the kernel's 64 KiB
# packets and a burst to match, a message of 256 KB would pass at twice the rate.
_BURST_S = 1e-3
_MIN_BURST_BYTES = 20_000
_PACKET_BYTES = 15_000
# More than the TCP windows of all connections to a node: the queue delays, as flow control would, and never drops.
_QUEUE_BYTES = 64_000_000
# Unshaped links keep `tbf`, for its byte counter, at a rate that no machine reaches.
_UNSHAPED_MBIT = 1e6

# Reno: every kernel has it and lets any namespace choose it, so that no result hangs on the host's setting (BBR loses
# 9 % where both directions are full). No IPv6, as neighbour discovery would count as traffic.
_HOLDER_SCRIPT = """
echo "$1" >/proc/sys/kernel/hostname
echo reno >/proc/sys/net/ipv4/tcp_congestion_control
for file in /proc/sys/net/ipv6/conf/*/disable_ipv6; do [ ! -e "$file" ] || echo 1 >"$file"; done
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
echo "$2" >/dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
rm /dev/shm/hosts
ip link set lo up
echo ready
exec cat >/dev/null
"""


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
        stopped: Ranks that were killed, because time was out or some seconds after another rank had failed.
        timed_out: Whether time was out before any rank had failed.
    """

    returncodes: tuple[int, ...]
    outputs: tuple[str, ...]
    stopped: tuple[int, ...]
    timed_out: bool

    def describe(self) -> str:
        """How each rank ended, and its last lines; those that failed by themselves come first."""
        order = sorted(range(len(self.outputs)), key=lambda rank: (rank in self.stopped, self.returncodes[rank] == 0))
        return "\n".join(f"--- rank {rank} {self._end(rank)}:\n{self._tail(rank)}" for rank in order)

    def _end(self, rank: int) -> str:
        return "(stopped)" if rank in self.stopped else f"(exit status {self.returncodes[rank]})"

    def _tail(self, rank: int) -> str:
        return "\n".join(self.outputs[rank].splitlines()[-_TAIL_LINES:])


def unavailable_reason() -> str | None:
    """Why no cluster can be made here, or None if a trial made one (0.1 s)."""
    try:
        with Cluster(nodes=1, ranks_per_node=1, rate_mbit=100):
            return None
    except ClusterUnavailableError as error:
        return str(error)


class Cluster:
    """Emulated nodes; a context manager. Node i is called ``node<i>`` and has the address 10.77.0.<i + 1>.

    Args:
        nodes: Number of nodes, at most 250.
        ranks_per_node: Ranks on each node, or on all of them.
        rate_mbit: Speed of each node's link in both directions, headers included, in Mbit/s; None leaves it unshaped.

    Raises:
        ValueError: If a number is not positive, or ``ranks_per_node`` is not one number a node.
        ClusterUnavailableError: On entering, if this machine cannot emulate a cluster.
    """

    def __init__(self, *, nodes: int, ranks_per_node: int | Sequence[int], rate_mbit: float | None) -> None:
        counts = [ranks_per_node] * nodes if isinstance(ranks_per_node, int) else list(ranks_per_node)
        if not 1 <= nodes <= 250 or len(counts) != nodes or min(counts) < 1:
            raise ValueError(
                f"nodes={nodes} with ranks_per_node={ranks_per_node}: give 1 to 250 nodes and a positive number of"
                " ranks for all, or one for each"
            )
        self._counts = counts
        self._rate_mbit = _checked_rate(rate_mbit)
        self._runs = 0

    def __enter__(self) -> Self:
        hosts = "127.0.0.1 localhost"
        for index in range(len(self._counts)):  # torch looks names up in the IPv6 form of the addresses, too
            hosts += f"\n{_address(index)} node{index}\n::ffff:{_address(index)} node{index}"
        with contextlib.ExitStack() as stack:
            self._hub = stack.enter_context(_Holder("hub", hosts))
            self._hub.call("ip link add bridge0 type bridge")
            self._hub.call("ip link set bridge0 up")
            self._nodes = [stack.enter_context(_Holder(f"node{i}", hosts)) for i in range(len(self._counts))]
            for index, node in enumerate(self._nodes):
                self._connect(node, _address(index))
            self.set_rate(self._rate_mbit)
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def set_rate(self, rate_mbit: float | None) -> None:
        """Shapes both ends of every link to ``rate_mbit``; None lifts the limit. The counters of `wire_bytes` go on.

        Raises:
            ValueError: If the rate is not positive.
        """
        self._rate_mbit = _checked_rate(rate_mbit)
        bits_per_s = round((rate_mbit or _UNSHAPED_MBIT) * 1e6)
        burst = max(round(bits_per_s / 8 * _BURST_S), _MIN_BURST_BYTES)
        shape = f"tbf rate {bits_per_s}bit burst {burst}b limit {_QUEUE_BYTES}b"
        for node in self._nodes:
            for holder, device in ((node, _INTERFACE), (self._hub, node.name)):
                # Of the same kind and handle, the queue is changed in place.
                holder.call(f"tc qdisc replace dev {device} root handle 1: {shape}")

    def wire_bytes(self) -> dict[int, int]:
        """Bytes that each node has sent so far, all headers up to Ethernet's included."""
        show = f"tc -s -j qdisc show dev {_INTERFACE}"
        return {index: int(json.loads(node.call(show))[0]["bytes"]) for index, node in enumerate(self._nodes)}

    def run(self, command: Sequence[str], *, timeout_s: float, stream: bool = False, check: bool = True) -> RunResult:
        """Runs ``command`` on every rank, here in the file system and with the environment that torchrun would give it.

        When a rank fails, the others have some seconds to end. A process that a rank gives a session of its own may
        live until the cluster is closed.

        Args:
            command: Program and arguments.
            timeout_s: Seconds until all ranks are ended.
            stream: Whether rank 0's output is also printed as it comes.
            check: Whether a failing rank or the time-out raises; otherwise the result tells.

        Raises:
            ClusterRunError: If ``check`` is set and a rank failed or the run was out of time.
        """
        self._runs += 1
        ranks: list[_Rank] = []
        stopped = []
        try:
            for node, environment in self._launches():
                ranks.append(_Rank(node.inside(command), environment))
            timed_out = _wait(ranks, time.monotonic() + timeout_s, stream)
        finally:
            stopped = [number for number, rank in enumerate(ranks) if rank.stop()]
        returncodes = tuple(rank.process.returncode for rank in ranks)
        result = RunResult(returncodes, tuple(rank.close() for rank in ranks), tuple(stopped), timed_out)
        if check and any(returncodes):
            failed = [rank for rank, code in enumerate(returncodes) if code and rank not in stopped]
            reason = f"out of time after {timeout_s:g} s" if timed_out else f"ranks {failed} failed"
            raise ClusterRunError(f"{reason}: {' '.join(command)}\n{result.describe()}")
        return result

    def _connect(self, node: "_Holder", address: str) -> None:
        # Made from within the hub, so that neither end is ever in the host's own network.
        self._hub.call(f"ip link add {node.name} type veth peer name {_INTERFACE} netns {node.pid}")
        self._hub.call(f"ip link set {node.name} master bridge0 up")
        node.call(f"ip link set {_INTERFACE} gso_max_size {_PACKET_BYTES}")
        node.call(f"ip address add {address}/24 dev {_INTERFACE}")
        node.call(f"ip link set {_INTERFACE} up")

    def _launches(self) -> Iterator[tuple["_Holder", dict[str, str]]]:
        """Each rank's node and launcher variables, in the order of ranks."""
        places = [(node, local_rank) for node, count in enumerate(self._counts) for local_rank in range(count)]
        for rank, (node, local_rank) in enumerate(places):
            yield (
                self._nodes[node],
                {
                    "MASTER_ADDR": _address(0),
                    "MASTER_PORT": str(_PORT + self._runs),  # what outlived the last run may still hold its port
                    "RANK": str(rank),
                    "LOCAL_RANK": str(local_rank),
                    "WORLD_SIZE": str(len(places)),
                    "LOCAL_WORLD_SIZE": str(self._counts[node]),
                    "GROUP_RANK": str(node),
                    "NODE_RANK": str(node),
                    "ROLE_RANK": str(rank),
                    "TORCHELASTIC_RUN_ID": "emulated",  # makes torch and Lightning take this for torchrun
                    "TORCHELASTIC_RESTART_COUNT": "0",
                    "GLOO_SOCKET_IFNAME": _INTERFACE,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONUNBUFFERED": "1",
                },
            )


class _Holder:
    """A process that keeps one node's namespaces alive.

    Args:
        name: Host name.
        hosts: Contents of /etc/hosts.

    Raises:
        ClusterUnavailableError: If the namespaces cannot be made.
    """

    def __init__(self, name: str, hosts: str) -> None:
        if not sys.platform.startswith("linux") or os.geteuid() != 0:
            raise ClusterUnavailableError("an emulated cluster needs Linux and root, to make network namespaces")
        self.name = name
        unshare = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with _missing_tool_reported():
            self._process = subprocess.Popen(
                [*unshare, "sh", "-euc", _HOLDER_SCRIPT, "sh", name, hosts],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # an interrupt at the terminal is for us, and we end the holders
            )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line != "ready\n":
            reason = line + self._process.stdout.read()
            self.close()
            raise ClusterUnavailableError(f"cannot make the namespaces of {name}: {reason.strip()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the holder, and thereby all processes of the node."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:  # a fork of this process has the pipe open
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command that runs ``command`` on this node, in this process's working directory."""
        # The process we know made the PID namespace for its child, the holder proper, and is itself outside.
        pids = f"--pid=/proc/{self.pid}/ns/pid_for_children"
        namespaces = ["--target", str(self.pid), "--net", "--uts", "--mount", pids]
        # Entering a mount namespace leaves one at its root.
        return ["nsenter", *namespaces, "env", f"--chdir={Path.cwd()}", *command]

    def call(self, command: str) -> str:
        """Runs ``ip`` or ``tc`` in this node's network and returns its output.

        Raises:
            ClusterUnavailableError: If it fails.
        """
        enter = ["nsenter", "--target", str(self.pid), "--net"]
        with _missing_tool_reported():
            done = subprocess.run([*enter, *command.split()], capture_output=True, text=True)
        if done.returncode:
            raise ClusterUnavailableError(f"{command!r} failed on {self.name}: {done.stderr.strip()}")
        return done.stdout


class _Rank:
    """A running rank. It prints to a nameless file, so that it never waits for us.

    Args:
        command: Program and arguments.
        environment: Variables beside those of this process.
    """

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed with this object)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._echoed = 0
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its own children can be ended with it
        )

    def stop(self) -> bool:
        """Kills the rank and its children, unless it has ended; returns whether it had to."""
        if self.process.poll() is not None:
            return False
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return True

    def close(self) -> str:
        """Returns all that the rank has printed, and forgets it."""
        output = self._read(0).decode(errors="replace")
        self._file.close()
        return output

    def echo(self) -> None:
        """Prints what the rank has printed since the last call."""
        new = self._read(self._echoed)
        self._echoed += len(new)
        print(self._decoder.decode(new), end="", flush=True)

    def _read(self, offset: int) -> bytes:
        # The rank writes at the file's position, which `pread` leaves alone.
        descriptor = self._file.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size - offset, offset)


def _wait(ranks: Sequence[_Rank], deadline: float, stream: bool) -> bool:
    """Waits until all ranks have ended, or some seconds longer than the first failure; True if out of time."""
    failed = False
    while True:
        codes = [rank.process.poll() for rank in ranks]
        if stream:
            ranks[0].echo()
        if None not in codes:
            return False
        if not failed and any(codes):
            failed = True
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline:
            return not failed
        time.sleep(_POLL_S)


def _address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def _checked_rate(rate_mbit: float | None) -> float | None:
    if rate_mbit is not None and not 0 < rate_mbit <= 100_000:
        raise ValueError(f"rate_mbit={rate_mbit} must be a positive number of Mbit/s, at most 100000, or None")
    return rate_mbit


@contextlib.contextmanager
def _missing_tool_reported() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ClusterUnavailableError(f"{error.filename} is missing (packages iproute2 and util-linux)") from error


def _parser() -> argparse.ArgumentParser:
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
    return parser


def main() -> int:
    """The command line; returns the exit status."""
    arguments = _parser().parse_args()
    counts = arguments.ranks_per_node
    ranks = counts[0] if len(counts) == 1 else counts
    try:
        with Cluster(nodes=arguments.nodes, ranks_per_node=ranks, rate_mbit=arguments.rate_mbit) as cluster:
            cluster.run(arguments.command, timeout_s=arguments.timeout_s, stream=True)
            print(", ".join(f"node {node} sent {sent / 1e6:.2f} MB" for node, sent in cluster.wire_bytes().items()))
    except (ValueError, ClusterUnavailableError, ClusterRunError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
