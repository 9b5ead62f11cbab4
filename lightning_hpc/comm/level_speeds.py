"""The speed of each level of a topology that was declared and not measured."""

import dataclasses
import statistics

from lightning_hpc.comm.grouping import height_of
from lightning_hpc.comm.link_speed import LinkSpeed
from lightning_hpc.comm.probe_result import ProbeResult
from lightning_hpc.comm.topology import Topology


def with_measured_links(declared: Topology, found: ProbeResult) -> Topology:
    """Adds speeds to a declared topology: the median over the measured pairs of each level.

    Where the probe has seen the same domains, its own figures are taken. A level without a measured pair, such as that
    within nodes of one rank, gets those of the next one.

    Args:
        declared: The topology.
        found: What a probe of the same ranks has measured.
    """
    if found.topology == declared:
        return found.topology
    links: list[LinkSpeed] = []
    for height in reversed(range(declared.depth)):
        measured = _speeds(declared, found, height)
        links.insert(0, _median(measured) if measured else links[0] if links else found.links[-1])
    return dataclasses.replace(declared, links=tuple(links))


def _speeds(declared: Topology, found: ProbeResult, height: int) -> list[LinkSpeed]:
    speeds = []
    for sender, row in enumerate(found.bytes_per_second):
        for receiver, rate in enumerate(row):
            latency = found.latency_seconds[sender][receiver]
            if rate is not None and latency is not None and height_of(declared, (sender, receiver)) == height:
                speeds.append(LinkSpeed(latency, rate))
    return speeds


def _median(speeds: list[LinkSpeed]) -> LinkSpeed:
    return LinkSpeed(
        statistics.median(speed.latency_seconds for speed in speeds),
        statistics.median(speed.bytes_per_second for speed in speeds),
    )
