"""Appends records to a trace file so that whatever ends the process costs the line being written at most."""

import errno
import os
from pathlib import Path


class TraceWriter:
    """A new trace file, which only its owner may read. One record is one line, handed to the kernel by one `write`.

    Nothing is buffered, so ``kill -9`` loses no finished line. A file that exists is never touched.

    Args:
        path: The file to create, in an existing directory.
        header: Its first line, with the newline.

    Raises:
        FileExistsError: If the file is there already.
        OSError: If it cannot be created or written.
    """

    def __init__(self, path: Path, header: bytes) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        self.write(header)

    def write(self, line: bytes) -> None:
        """Appends one line, newline included.

        Raises:
            OSError: If the line could not be written, or not as a whole: the file must not be written to any more.
        """
        try:
            written = os.write(self._descriptor, line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        if written != len(line):
            raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes were written", str(self.path))

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)
