"""The paths that a list or a pattern of shards stands for."""

import glob
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
        IsADirectoryError: If a path is that of a folder.
        TypeError: If it is neither a pattern nor paths.
        ValueError: If there is no path, or one is there twice.
    """
    given = [shards] if isinstance(shards, (str, Path)) else shards
    if not isinstance(given, Sequence) or not all(isinstance(each, (str, Path)) for each in given):
        raise TypeError(f"shards={shards!r} must be a pattern, or a list of paths of tar files")
    paths = _expand(str(shards)) if given is not shards else [str(path) for path in given]
    if not paths:
        raise ValueError(f"shards={shards!r} stands for no path; give at least one of a tar file")
    for path in paths:
        if Path(path).is_dir():
            raise IsADirectoryError(f"shard {path} is a folder; write '{Path(path) / '*.tar'}' for the files in it")
    for absolute, times in Counter(Path(path).absolute() for path in paths).items():
        if times > 1:
            raise ValueError(f"shard {absolute} is listed {times} times; its samples would come as often in each epoch")
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
    first, last = int(bounds[1]), int(bounds[2])
    if last < first:
        raise ValueError(f"{{{text}}} counts down; write {{{bounds[2]}..{bounds[1]}}}")
    return [str(number).zfill(len(bounds[1])) for number in range(first, last + 1)]
