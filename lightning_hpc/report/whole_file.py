"""Files that are there as a whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path, *, is_private: bool = False) -> Iterator[BinaryIO]:
    """Opens a file to write, which gets its name when all of it is written; until then the one before stays.

    What is no regular file, as ``/dev/stdout``, is written to as it is.

    Args:
        path: In a directory that exists.
        is_private: Whether only its owner may read it.

    Raises:
        OSError: If it cannot be written; with its name.
    """
    path = path.resolve()  # a link stays one
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        try:
            part.unlink(missing_ok=True)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if is_private else 0o666)
            with os.fdopen(descriptor, "wb") as file:
                yield file
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        if error.filename not in (None, part, str(part)):  # of another file, which was read meanwhile
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_whole(path: Path, text: str, *, is_private: bool = False) -> None:
    """Writes a text, in UTF-8, as `whole_file` does.

    Raises:
        OSError: If it cannot be written; with its name.
    """
    with whole_file(path, is_private=is_private) as file:
        # A name in a file of JSON may hold half a character.
        file.write(text.encode("utf-8", errors="replace"))
