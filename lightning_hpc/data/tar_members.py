"""The plain files in a tar, found by walking its headers.

They are walked here and not by `tarfile`, which takes a damaged header in the middle of a file for the end of the
archive, reserves as many bytes for a long name as the file claims, and needs two to five times as long for a member.
"""

import os
from collections.abc import Iterator

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_REGULAR, _DIRECTORY, _LONG_NAME, _LONG_LINK, _PAX, _GLOBAL_PAX = b"0\0" + b"7", b"5", b"L", b"K", b"x", b"g"
_NAME_LIMIT = 2**20  # bytes of a long name or of extended attributes; paths end at 4096 on Linux
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


def members_of(fd: int, path: str, file_size: int) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each plain file in a tar (POSIX ustar and pax, GNU, and the old V7 form).

    Args:
        fd: Descriptor of the tar, open for reading.
        path: Its path, for messages.
        file_size: Its bytes.

    Yields:
        The name; where its content begins in the file, in bytes; bytes of the content.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is no uncompressed tar, is torn or damaged, or holds links or other things that are no plain
            files. Members before the fault have been yielded by then.
    """
    offset, name, size = 0, None, None  # name and size: what an extended header says of the next member
    while True:
        header = os.pread(fd, _BLOCK, offset)
        if header == _ZEROS:
            _check_end(fd, path, offset)
            return
        _check_header(header, path, offset)
        kind = header[156:157]
        own_name = _name(header)
        length = size if size is not None and kind in _REGULAR else _number(header[124:136])
        start = offset + _BLOCK
        if length is None or not 0 <= length <= file_size - start:
            raise ValueError(
                f"shard {path}, member {name or own_name!r} at byte {offset}: its header announces {length} bytes, but"
                f" {file_size - start} follow; the file is torn or damaged, copy or make it again"
            )
        if kind in (_LONG_NAME, _LONG_LINK, _PAX, _GLOBAL_PAX):
            extended = _extended(fd, path, offset, length)
            if kind == _LONG_NAME:
                name = _text(extended)
            elif kind == _PAX:
                name, size = _pax_records(extended, path, offset, name, size)
        else:
            if kind in _REGULAR and not own_name.endswith("/"):
                yield name or own_name, start, length
            elif kind != _DIRECTORY and not own_name.endswith("/"):
                raise ValueError(
                    f"shard {path}, member {name or own_name!r} at byte {offset}: it is a link or a special file"
                    f" (type {kind!r}), which has no content of its own; pack the file itself (tar --dereference)"
                )
            name = size = None
        offset = start + -(-length // _BLOCK) * _BLOCK


def _check_header(header: bytes, path: str, offset: int) -> None:
    if offset == 0:
        for magic, method in _COMPRESSED.items():
            if header.startswith(magic):
                raise ValueError(
                    f"shard {path} is compressed ({method}); samples are read in place: unpack it to a .tar"
                )
    if len(header) < _BLOCK:
        raise ValueError(f"shard {path} ends at byte {offset} without the end mark of a tar: it is torn, copy it again")
    # The checksum is the sum of the header's bytes, with blanks in its own place.
    if _number(header[148:156]) != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        raise ValueError(f"shard {path} has no tar header at byte {offset}; it is damaged or no tar, make it again")


def _check_end(fd: int, path: str, offset: int) -> None:
    """Raises if something follows the end mark, as in two tars that were concatenated; `tarfile` would not say so."""
    while block := os.pread(fd, 2**20, offset):
        if block.count(0) != len(block):
            raise ValueError(f"shard {path} goes on after its end mark at byte {offset}; split it, or make it again")
        offset += len(block)


def _extended(fd: int, path: str, offset: int, length: int) -> bytes:
    if length > _NAME_LIMIT:
        raise ValueError(f"shard {path}: the extended header at byte {offset} announces {length} bytes; it is damaged")
    return os.pread(fd, length, offset + _BLOCK)


def _pax_records(
    content: bytes, path: str, offset: int, name: str | None, size: int | None
) -> tuple[str | None, int | None]:
    """Path and size from records of the form ``length keyword=value`` and a newline (POSIX.1-2001, pax)."""
    try:
        while content:
            length = int(content.split(b" ", 1)[0])
            keyword, _, value = content[:length].split(b" ", 1)[1].partition(b"=")
            if length < 5 or content[length - 1 : length] != b"\n":
                raise ValueError(f"a record of {length} bytes")
            if keyword.startswith(b"GNU.sparse"):
                raise ValueError("a sparse file; pack it without --sparse")
            name = _text(value[:-1]) if keyword == b"path" else name
            size = int(value) if keyword == b"size" else size
            content = content[length:]
    except (IndexError, ValueError) as error:
        raise ValueError(f"shard {path}: the extended header at byte {offset} cannot be read: {error}") from error
    return name, size


def _name(header: bytes) -> str:
    name, prefix = _text(header[:100]), header[345:500]
    # GNU's own form ("ustar  ") has times where POSIX has the first part of a long path.
    return f"{_text(prefix)}/{name}" if header[257:263] == b"ustar\0" and prefix[0] else name


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _number(field: bytes) -> int | None:
    """Octal digits, or a binary number behind a marked first byte, as GNU writes 8 GiB and more; None if neither."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        return None
