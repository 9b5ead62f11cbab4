"""Finds out, after a failure, which ranks have failed too, where, and which are missing."""

import itertools
import time
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

_PATIENCE_S = 3.0
_POLL_S = 0.05
_MAX_CHARACTERS = 300

_generations = itertools.count()  # the same on all ranks, since making a roll call is a collective


class RollCall:
    """Ranks that fail leave word in a store, and look for the word of the others.

    Args:
        store: Shared by all ranks.
        rank: This one.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = PrefixStore(f"lightning_hpc/failures/{next(_generations)}", store)
        self._rank = rank

    @classmethod
    def of_default_group(cls) -> "RollCall":
        """Uses the store of the default process group, which torch gives no public name."""
        return cls(_get_default_store(), dist.get_rank())

    def report(self, what: str, ranks: Sequence[int]) -> str:
        """Leaves word of this rank's failure, waits some seconds for that of others, and says what it has found.

        Args:
            what: Where this rank failed, and why.
            ranks: The ranks that should have been there.

        Returns:
            A sentence for the error message.
        """
        try:
            self._store.set(str(self._rank), what[:_MAX_CHARACTERS])
            words = self._collect([rank for rank in ranks if rank != self._rank])
        except (RuntimeError, ConnectionError):  # its host is gone
            return "The other ranks cannot be asked, since the store of the process group is gone (rank 0 keeps it)."
        missing = [rank for rank, word in words.items() if word is None]
        said = [f"Rank {rank} says: {word}." for rank, word in words.items() if word is not None]
        if missing:
            said.insert(0, f"No word from ranks {missing}: they have died, stopped, or wait elsewhere.")
        return " ".join(said)

    def _collect(self, ranks: Sequence[int]) -> dict[int, str | None]:
        deadline = time.monotonic() + _PATIENCE_S
        words: dict[int, str | None] = dict.fromkeys(ranks)
        # The store ends with rank 0, so that one waits for the others to have asked.
        while time.monotonic() < deadline and (None in words.values() or self._rank == 0):
            for rank in ranks:
                if words[rank] is None and self._store.check([str(rank)]):
                    words[rank] = self._store.get(str(rank)).decode(errors="replace")
            time.sleep(_POLL_S)
        return words
