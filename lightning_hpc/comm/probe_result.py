"""What a probe has found, and its file: a saved topology with more in it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from typing_extensions import Self

from lightning_hpc.comm.hardware import Hardware
from lightning_hpc.comm.link_speed import LinkSpeed
from lightning_hpc.comm.rank_facts import RankFacts
from lightning_hpc.comm.topology import Topology

Matrix: TypeAlias = tuple[tuple[float | None, ...], ...]
"""One row for each sender, one column for each receiver; None where the pair has not been measured."""


@dataclass(frozen=True)
class ProbeResult:
    """The measured topology of a job, the same on all ranks.

    Attributes:
        topology: The ranks in nested domains, with the speed of each level in ``topology.links``.
        latency_seconds: One way, of an empty message, for each measured pair of ranks.
        bytes_per_second: Payload, without headers, for each measured pair. Short tests on shaped links read a little
            high; ``links`` are from long messages.
        ranks: What each rank says of its place.
        hosts: For each rank the lowest rank that it shares a host with, by shared memory. Evidence, not the decision.
        warnings: Links that are far slower than their peers, by name.
        seconds: What the probe took.
    """

    topology: Topology
    latency_seconds: Matrix = ()
    bytes_per_second: Matrix = ()
    ranks: tuple[RankFacts, ...] = ()
    hosts: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def links(self) -> tuple[LinkSpeed, ...]:
        """Speed of each level of the topology, innermost first; empty for a single rank."""
        return self.topology.links

    @property
    def host_names(self) -> tuple[str, ...]:
        """Host name of each rank, or empty."""
        return tuple(facts.host for facts in self.ranks)

    def save(self, path: str | Path) -> None:
        """A topology file, as `Topology.load` and ``HPCStrategy(topology=…)`` read it, with all figures in it."""
        probe = {key: value for key, value in asdict(self).items() if key != "topology"}
        content = {**self.topology.to_json(), "probe": probe}
        Path(path).write_text(json.dumps(content) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a file of `save`, or of `Topology.save`, which has no figures of pairs.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it is not a topology file, or its content is not what a probe writes.
        """
        topology = Topology.load(path)
        content = json.loads(Path(path).read_text(encoding="utf-8")).get("probe", {})
        try:
            return cls(
                topology,
                _matrix(content.get("latency_seconds", ()), topology.world_size),
                _matrix(content.get("bytes_per_second", ()), topology.world_size),
                tuple(_facts(rank) for rank in content.get("ranks", ())),
                tuple(int(host) for host in content.get("hosts", ())),
                tuple(str(text) for text in content.get("warnings", ())),
                float(content.get("seconds", 0.0)),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not what a probe has saved: {error!r}") from error


def _matrix(rows: Sequence[Sequence[float | None]], size: int) -> Matrix:
    if rows and (len(rows) != size or any(len(row) != size for row in rows)):
        raise ValueError(f"a matrix of {len(rows)} rows for {size} ranks")
    return tuple(tuple(None if value is None else float(value) for value in row) for row in rows)


def _facts(content: dict[str, Any]) -> RankFacts:
    hardware = dict(content["hardware"])
    hardware["nvlink_peers"] = tuple(hardware["nvlink_peers"])
    return RankFacts(**{**content, "hardware": Hardware(**hardware)})
