"""The paths that a list or a pattern of shards stands for."""

import glob
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path


def find_shards(shards: str | Path | Sequence[str | Path]) -> list[str]:
    """The paths that are meant, in order.

    Args:
        shards: Paths; or one pattern with ``*``, ``?``, ``[…]`` (found files are sorted), ``{000..146}`` or ``{a,b}``.
            The path of a file that exists stands for itself, whatever characters it has.

    Raises:
        FileNotFoundError: If no file fits a pattern.
        ValueError: If there is no path, or one is there twice.
    """
    paths = _expand(os.fspath(shards)) if isinstance(shards, (str, Path)) else [os.fspath(path) for path in shards]
    if not paths:
        raise ValueError("shards is an empty list; give at least one path of a tar file")
    for path, times in Counter(Path(path).absolute() for path in paths).items():
        if times > 1:
            raise ValueError(f"shard {path} is listed {times} times; its samples would come as often in each epoch")
    return paths


def _expand(pattern: str) -> list[str]:
    if Path(pattern).exists():
        return [pattern]
    braces = re.search(r"\{([^{}]*)\}", pattern)
    if braces:
        before, after = pattern[: braces.start()], pattern[braces.end() :]
        return [path for choice in _choices(braces[1]) for path in _expand(before + choice + after)]
    found = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
    if not found:
        raise FileNotFoundError(
            f"no shard fits {pattern!r}; give paths of tar files or a pattern such as 'train-*.tar'"
        )
    return found


def _choices(text: str) -> list[str]:
    """What braces stand for: ``000..146`` or ``a,b``."""
    bounds = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if bounds is None:
        return text.split(",")
    return [str(number).zfill(len(bounds[1])) for number in range(int(bounds[1]), int(bounds[2]) + 1)]
