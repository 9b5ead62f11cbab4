"""Runs one thing after the other on all ranks of a job, so that one that fails does not take the others with it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from torch.distributed.rendezvous import rendezvous
from typing_extensions import Self


@dataclass(frozen=True)
class Outcome:
    """What all ranks returned.

    Attributes:
        values: By rank; empty if a rank failed.
        error: What went wrong, with the rank's number, or None.
    """

    values: tuple[Any, ...]
    error: str | None = None


class Ranks:
    """The ranks of a job. They talk through a store, which no failed collective can break; a context manager.

    Args:
        environment: Of the launcher.
        backend: ``"gloo"`` or ``"nccl"``.
        timeout: How long a rank waits in a collective for another one.
    """

    def __init__(self, environment: ClusterEnvironment, backend: str, timeout: timedelta) -> None:
        self.rank, self.size = environment.global_rank(), environment.world_size()
        self._backend, self._timeout = backend, timeout
        # A rank that failed waits for those that wait for it, and for what they do before and after.
        self._patience = 2 * timeout + timedelta(seconds=60)
        self._store, _, _ = next(rendezvous("env://", self.rank, self.size, timeout=self._patience))
        self._calls = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind not in (None, SystemExit):
            return
        self._store.set(f"bench/left/{self.rank}", "1")
        if self.rank == 0:  # whose process holds the store
            self._store.wait([f"bench/left/{rank}" for rank in range(self.size)], self._patience)

    def call(self, function: Callable[[], Any]) -> Outcome:
        """Calls a function on all ranks, each time with a new default process group.

        Args:
            function: Returns what JSON can hold.

        Returns:
            The same on all ranks: either what all of them returned, or what went wrong on the first that failed.
        """
        self._calls += 1
        own = self._try(function)
        place = f"bench/call{self._calls}"
        self._store.set(f"{place}/{self.rank}", json.dumps(own))
        keys = [f"{place}/{rank}" for rank in range(self.size)]
        self._store.wait(keys, self._patience)
        answers = [json.loads(self._store.get(key)) for key in keys]
        # A rank that waited in vain for another one says little; the other one knows why.
        failed = [(rank, answer["error"]) for rank, answer in enumerate(answers) if "error" in answer]
        failed.sort(key=lambda failure: _is_consequence(failure[1]))
        if failed:
            return Outcome((), "rank {}: {}".format(*failed[0]))
        return Outcome(tuple(answer["value"] for answer in answers))

    def _try(self, function: Callable[[], Any]) -> dict[str, Any]:
        try:
            # (mypy: not every build of torch has the name.)
            store = dist.PrefixStore(f"bench/group{self._calls}", self._store)  # type: ignore[attr-defined]
            dist.init_process_group(
                self._backend, store=store, rank=self.rank, world_size=self.size, timeout=self._timeout
            )
            return {"value": function()}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _is_consequence(error: str) -> bool:
    return any(word in error.lower() for word in ("timed out", "timeout", "connection", "communicationerror"))
