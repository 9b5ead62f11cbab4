"""Keeps what codecs lose, and adds it to the next step's gradients."""

import torch
from torch import Tensor

from lightning_hpc.comm.layout import Part, Run


class ErrorFeedback:
    """The residuals of the parameter parts that this rank encodes (Seide et al. 2014, Karimireddy et al. 2019).

    They are kept in one flat fp32 tensor for each run of parts that is encoded together, and are known by parameter
    name and first element, so that they find their place again when the runs change.
    """

    def __init__(self) -> None:
        self._runs: dict[Run, Tensor] = {}
        self._padding: dict[Run, Tensor] = {}
        self._parts: dict[tuple[str, int], tuple[Tensor, Run | None]] = {}

    def residual(self, run: Run, device: torch.device) -> Tensor:
        """The residual of a run, to be added to its values.

        Args:
            run: What is encoded together.
            device: Where its values are.

        Returns:
            The same flat fp32 tensor of the run's elements at every call; zeros at first.
        """
        residual = self._runs.get(run)
        if residual is None:
            residual = self._runs[run] = torch.zeros(run.numel, device=device)
            self._padding[run] = run.padding.to(device)
            for part in run.parts:
                self._adopt(part, run, residual)
        return residual

    def keep(self, run: Run, lost: Tensor, unless: Tensor | None = None) -> None:
        """Overwrites a run's residual.

        Args:
            run: What was encoded together.
            lost: What was lost of it now.
            unless: A boolean scalar: whether the residual stays as it is instead.
        """
        residual = self.residual(run, lost.device)
        residual.copy_(lost if unless is None else torch.where(unless, residual, lost))
        # What a codec makes of padding belongs to no parameter. Kept, it would go into the next step's blocks, and be
        # gone after other cuts or a checkpoint.
        padding = self._padding[run]
        if padding.numel():
            residual.index_fill_(0, padding, 0.0)

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of each part's residual on the CPU; a key is ``<first element>:<parameter>``."""
        return {
            f"{start}:{name}": residual.to("cpu", copy=True) for (name, start), (residual, _) in self._parts.items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores what `state_dict` gave."""
        self._runs.clear()
        self._padding.clear()
        self._parts.clear()
        for key, residual in state.items():
            start, _, name = key.partition(":")
            self._parts[name, int(start)] = (residual, None)

    def _adopt(self, part: Part, run: Run, residual: Tensor) -> None:
        """Moves a part's residual from the run that it was in, if any, to a new one."""
        key = (part.parameter.name, part.start)
        offset = part.offset - run.start
        place = residual[offset : offset + part.numel]
        if key in self._parts:
            former, former_run = self._parts[key]
            if former.numel() == part.numel:
                place.copy_(former)
            if former_run is not None:
                # If that run comes back, it is put together anew.
                self._runs.pop(former_run, None)
                self._padding.pop(former_run, None)
        self._parts[key] = (place, run)
