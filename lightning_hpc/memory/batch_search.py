"""The search for the largest batch size that fits. Knows sizes and answers only."""

from collections.abc import Sequence


class BatchSearch:
    """Asks for sizes to try until the largest one that fits is known.

    It doubles first, so that trials begin small, and bisects then.

    Args:
        sizes: Those that are allowed, ascending. If one does not fit, no larger one does.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        assert sizes
        assert list(sizes) == sorted(set(sizes))
        self._sizes = sizes
        self._fits = -1  # index of the largest size that fits
        self._fails = len(sizes)  # and of the smallest that does not

    @property
    def size(self) -> int | None:
        """What to try next; None if the search is over."""
        if self._fails - self._fits == 1:
            return None
        return self._sizes[self._next()]

    @property
    def largest(self) -> int | None:
        """The largest size so far that fits; None if none has."""
        return self._sizes[self._fits] if self._fits >= 0 else None

    def answer(self, fits: bool) -> None:
        """Whether `size` fits."""
        if fits:
            self._fits = self._next()
        else:
            self._fails = self._next()

    def _next(self) -> int:
        if self._fits < 0:
            return 0
        if self._fails < len(self._sizes):
            return (self._fits + self._fails) // 2
        doubled = (index for index, size in enumerate(self._sizes) if size >= 2 * self._sizes[self._fits])
        return next(doubled, len(self._sizes) - 1)


def divisors(number: int) -> list[int]:
    """All of them, ascending.

    Args:
        number: 1 or more.
    """
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
