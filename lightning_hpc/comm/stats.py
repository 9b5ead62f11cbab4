"""What the gradient communication did: bytes by level, steps, exposed time, codec and fallbacks."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class SentBytes:
    """Payload bytes that this rank has sent in one stage. Each counter has one writer, so it needs no lock."""

    level: str
    total: int = 0


@dataclass(frozen=True)
class Decision:
    """A choice of ``compression="auto"``.

    Attributes:
        step: Optimizer steps before it.
        choice: ``"ddp"`` for the flat ring, ``"none"`` for the exact hierarchy, or a codec.
        reason: What speaks for it.
        predicted: Seconds a step of each choice, by the cost model.
        measured: Seconds a step of those that were tried.
    """

    step: int
    choice: str
    reason: str
    predicted: dict[str, float]
    measured: dict[str, float]


@dataclass
class CommStats:
    """Figures of one rank since the start of the fit. Cheap to read at any time; all of them only ever grow.

    Attributes:
        steps: Optimizer steps.
        reductions: Backward passes whose gradients were reduced (more than `steps` when several optimizers share a
            batch, the same with gradient accumulation).
        codecs: Number of buckets sent by each codec; ``"none"`` is uncompressed.
        fallbacks: What took another path than the planned one, by reason: buckets that are sparse or of a dtype that no
            codec takes, slices that are not finite or too dense.
        exposed_seconds: Seconds between the end of the backward computation and the arrival of the last reduced
            gradient, summed over `reductions`. On CUDA it lags by the steps whose events are still pending.
        decisions: What ``compression="auto"`` has decided, on rank 0.
    """

    steps: int = 0
    reductions: int = 0
    codecs: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    exposed_seconds: float = 0.0
    decisions: list[Decision] = field(default_factory=list)
    _sent: list[SentBytes] = field(default_factory=list)

    def __repr__(self) -> str:
        return (
            f"CommStats(steps={self.steps}, reductions={self.reductions}, bytes_sent={self.bytes_sent},"
            f" codecs={dict(self.codecs)}, fallbacks={dict(self.fallbacks)},"
            f" exposed_seconds={self.exposed_seconds:.4g}, decisions={len(self.decisions)})"
        )

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Payload bytes of gradients that this rank has sent, by level; protocol headers are not in it."""
        totals: Counter[str] = Counter()
        for sent in self._sent:
            if sent.total:
                totals[sent.level] += sent.total
        return dict(totals)

    def count_bytes(self, level: str) -> SentBytes:
        """Adds a counter for a stage of ``level``. The stage raises its `total`."""
        self._sent.append(SentBytes(level))
        return self._sent[-1]
