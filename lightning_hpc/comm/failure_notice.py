"""`FailureNotice`: tells all ranks that one of them cannot go on, so that nobody waits for it."""

import threading
from collections.abc import Callable
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

_KEY = "lightning_hpc:failure"
_POLL_S = 0.25
_ACKNOWLEDGE = timedelta(seconds=5)


class FailureNotice:
    """A word that a rank leaves in the store that the ranks have met at, which a thread of each rank looks at.

    Args:
        store: The store.
        rank: This rank.
        ranks: Number of ranks.
        interrupt: Called on the thread when another rank has failed, to end whatever this one waits for.
    """

    def __init__(self, store: Store, rank: int, ranks: int, interrupt: Callable[[], None]) -> None:
        self._store = store
        self._rank = rank
        self._others = [other for other in range(ranks) if other != rank]
        self._interrupt = interrupt
        self._text: str | None = None
        self._has_heard = threading.Event()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hpc:failure_notice", daemon=True)
        self._thread.start()

    def tell(self, text: str) -> None:
        """Tells the others, and waits a few seconds until they have heard."""
        self.close()
        self._store.set(_KEY, text)
        try:
            self._store.wait([f"{_KEY}:{other}" for other in self._others], _ACKNOWLEDGE)
        except RuntimeError:  # one of them is gone itself, or stopped
            return

    def text(self, wait_s: float = 0.0) -> str | None:
        """What another rank has told; None if nothing.

        Args:
            wait_s: Most seconds to wait for it.
        """
        self._has_heard.wait(wait_s)
        return self._text

    def close(self) -> None:
        """Ends the thread."""
        self._is_closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_closed.wait(_POLL_S):
            try:
                if not self._store.check([_KEY]):
                    continue
                self._text = self._store.get(_KEY).decode()
                self._store.set(f"{_KEY}:{self._rank}", "heard")
            except RuntimeError:  # whoever keeps the store is gone
                return
            self._has_heard.set()
            self._interrupt()
            return
