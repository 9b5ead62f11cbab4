"""Latency and bandwidth between two ranks, measured with messages.

The *lead* and its peer play two turns, so that each is the sender once. A turn, all messages on one communicator and
every one waited for, since NCCL would run what is posted ahead in the order of posting:

    sender    size →          data →          size → …   0 →
    receiver          ← ready         ← done

The sender's clock runs from `ready` to `done`: the data one way and an empty message back.
"""

import time
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist

from lightning_hpc.comm.link_speed import LinkSpeed

_PINGS = 8
# Until a message takes longer than what a late timer and an emulated link's burst (1 ms) can distort.
_LONG_ENOUGH_S = 16e-3
_GROWTH = 4


@dataclass(frozen=True)
class TestPlan:
    """Which messages a test sends.

    Args:
        first_bytes: Size of the first message; each further one is four times larger.
        max_bytes: The largest size. The test ends before if a message has taken long enough.
        repeat_ms: Messages of the largest size are repeated for so long, and the fastest counts: nothing but the link
            makes all of them slow.
    """

    __test__ = False  # not for pytest

    first_bytes: int
    max_bytes: int
    repeat_ms: int

    def __post_init__(self) -> None:
        assert 0 < self.first_bytes <= self.max_bytes
        assert self.repeat_ms >= 0


class PairTester:
    """One rank's side of all its tests.

    Args:
        group: The process group that carries the messages.
        device: Where its tensors lie.
        max_bytes: The largest message that any test sends.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, max_bytes: int) -> None:
        self._group = group
        self._device = device
        # Written once, or the first messages would measure the kernel handing out pages.
        self._buffer = torch.ones(max_bytes, dtype=torch.uint8, device=device)
        self._signal = torch.ones(1, dtype=torch.uint8, device=device)

    def lead(self, peer: int, plan: TestPlan) -> LinkSpeed:
        """Sends first. Returns the speed from here to ``peer``, a rank of the group."""
        speed = self._send_turn(peer, plan)
        self._receive_turn(peer)
        return speed

    def follow(self, peer: int, plan: TestPlan) -> LinkSpeed:
        """The other side of `lead`."""
        self._receive_turn(peer)
        return self._send_turn(peer, plan)

    def send_numbers(self, numbers: list[float], peer: int) -> None:
        """Sends a few numbers, which the peer awaits with `receive_numbers`."""
        self._send(torch.tensor(numbers, dtype=torch.float64, device=self._device), peer)

    def receive_numbers(self, count: int, peer: int) -> list[float]:
        """The numbers that ``peer`` sends."""
        tensor = torch.empty(count, dtype=torch.float64, device=self._device)
        self._receive(tensor, peer)
        return [float(number) for number in tensor.tolist()]

    def _send_turn(self, peer: int, plan: TestPlan) -> LinkSpeed:
        self._timed(peer, 1)  # opens the connection where that happens at first use
        round_trip = min(self._timed(peer, 1) for _ in range(_PINGS))
        size = plan.first_bytes
        while True:
            last = size == plan.max_bytes
            seconds = self._fastest(peer, size, plan.repeat_ms / 1e3 if last else 0.0)
            if last or seconds >= _LONG_ENOUGH_S:
                break
            size = min(size * _GROWTH, plan.max_bytes)
        self.send_numbers([0], peer)
        return LinkSpeed(round_trip / 2, size / max(seconds - round_trip, seconds / 2))

    def _fastest(self, peer: int, size: int, repeat_s: float) -> float:
        start = time.perf_counter()
        fastest = self._timed(peer, size)
        while time.perf_counter() - start < repeat_s:
            fastest = min(fastest, self._timed(peer, size))
        return fastest

    def _timed(self, peer: int, size: int) -> float:
        """Seconds from the first byte sent to the peer's confirmation of the last."""
        self.send_numbers([size], peer)
        self._receive(self._signal, peer)
        self._synchronize()
        start = time.perf_counter()
        self._send(self._buffer[:size], peer)
        self._receive(self._signal, peer)
        self._synchronize()
        return time.perf_counter() - start

    def _receive_turn(self, peer: int) -> None:
        while size := int(self.receive_numbers(1, peer)[0]):
            self._send(self._signal, peer)
            self._receive(self._buffer[:size], peer)
            self._send(self._signal, peer)

    def _send(self, tensor: torch.Tensor, peer: int) -> None:
        self._run(dist.P2POp(dist.isend, tensor, group=self._group, group_peer=peer))

    def _receive(self, tensor: torch.Tensor, peer: int) -> None:
        self._run(dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=peer))

    def _run(self, operation: dist.P2POp) -> None:
        # As a batch, since NCCL makes a communicator for every pair otherwise, which takes longer than the test.
        for work in dist.batch_isend_irecv([operation]):
            work.wait()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def encode_plan(plan: TestPlan) -> list[float]:
    """A plan as numbers to send."""
    return [float(number) for number in astuple(plan)]


def decode_plan(numbers: list[float]) -> TestPlan:
    """The reverse of `encode_plan`."""
    return TestPlan(*(int(number) for number in numbers))
