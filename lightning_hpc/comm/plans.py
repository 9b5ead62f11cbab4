"""Cuts buckets into slices for one rank, once for each bucket that comes along."""

from collections.abc import Sequence

from lightning_hpc.comm.groups import Level, count_leaves
from lightning_hpc.comm.layout import Grain, ParameterSpec, assign_homes, codec_slices, exact_slices
from lightning_hpc.comm.slices import SlicePlan
from lightning_hpc.comm.topology import Topology


class Planner:
    """Remembers how each bucket is cut: buckets change rarely, and residuals are bound to the plans.

    Args:
        topology: The ranks of the job.
        levels: This rank's levels.
        parameters: All parameters, in the order of the module.
    """

    def __init__(self, topology: Topology, levels: Sequence[Level], parameters: Sequence[ParameterSpec]) -> None:
        self._levels = levels
        self._lanes, self._outermost = count_leaves(topology)
        self._homes = {
            leaves: assign_homes(parameters, leaves) for leaves in (self._lanes, self._lanes * self._outermost)
        }
        self._exact: dict[tuple[int, int], list[SlicePlan]] = {}
        self._coded: dict[tuple[Grain, int, tuple[ParameterSpec, ...]], list[SlicePlan]] = {}

    def exact(self, numel: int, slice_numel: int) -> list[SlicePlan]:
        """The slices of a tensor of ``numel`` real numbers."""
        key = (numel, slice_numel)
        if key not in self._exact:
            layouts = exact_slices(numel, self._lanes, slice_numel)
            self._exact[key] = [SlicePlan.make(layout, self._levels) for layout in layouts]
        return self._exact[key]

    def coded(self, bucket: Sequence[ParameterSpec], grain: Grain, slice_numel: int) -> list[SlicePlan]:
        """The slices of a bucket for a codec."""
        key = (grain, slice_numel, tuple(bucket))
        if key not in self._coded:
            leaves = self._lanes * (self._outermost if grain.crossing else 1)
            layouts = codec_slices(bucket, leaves, slice_numel, grain, self._homes[leaves])
            self._coded[key] = [SlicePlan.make(layout, self._levels) for layout in layouts]
        return self._coded[key]
