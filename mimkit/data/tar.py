"""Where the members of a tar lie: a header scan that refuses anything but a whole, plain tar.

`tarfile` and stream readers take a cut, a hole or a bad header for the end of the archive and go
on with fewer samples. This scan looks at every header, at the end blocks and at what follows them.
"""

import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from mimkit.data._tar_header import (
    BLOCK,
    Header,
    TarError,
    damaged,
    parse_header,
    pax,
    text,
)

_ZEROS = bytes(BLOCK)
# tar pads to 10 kB by default; a longer run of zeros is a download that reserved its space.
_LONGEST_PADDING = 1 << 20
_LONGEST_NAME_RECORD = 1 << 20
_REGULAR = (b"0", b"\0", b"7")
_PASSED_OVER = (b"5", b"g", b"K")  # directories, comments, the long target of a link to come
_REFUSED = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a pipe",
    b"S": "a sparse file",
}
_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip -k"),
    b"BZh": ("bzip2", "bunzip2 -k"),
    b"\xfd7zXZ": ("xz", "unxz -k"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
}


class File(NamedTuple):
    """A regular file in a tar, under the name that it has there."""

    name: str
    offset: int  # of the data, in bytes
    size: int  # of the data, in bytes


class Member(NamedTuple):
    """One file of a sample: `KEY.EXTENSION`, split at the first dot of the base name."""

    key: str
    extension: str  # lower case, not empty
    offset: int  # of the data, in bytes
    size: int  # of the data, in bytes


def scan_tar(path: Path) -> list[Member]:
    """The members of the tar at `path`, in the order in which they lie there.

    Directories, hidden files and files without an extension are no samples and are passed over,
    as webdataset does; the members of one key must be neighbours.

    Raises:
        TarError: the file is compressed, cut, has a hole or a damaged header, holds links or
            devices, or the same name twice.
    """
    return members_of(list_files(path), path)


def list_files(path: Path) -> list[File]:
    """Every regular file in the tar at `path`. Raises TarError as `scan_tar` does."""
    try:
        with path.open("rb", buffering=0) as file:
            return list(_files(file.fileno(), path))
    except OSError as error:
        raise TarError(
            f"{path} cannot be read: {error.strerror or error}.", trouble="unreadable"
        ) from error


def members_of(files: Iterable[File], path: Path) -> list[Member]:
    """Those of `files` that belong to samples. Raises TarError for doubles, see `scan_tar`."""
    members = [member for file in files if (member := _split(file)) is not None]
    _check_neighbours(members, path)
    return members


def samples_of(members: Iterable[Member]) -> list[dict[str, Member]]:
    """The members of each sample by extension, in order."""
    groups = groupby(members, key=lambda member: member.key)
    return [{member.extension: member for member in group} for _, group in groups]


def _files(fd: int, path: Path) -> Iterator[File]:
    long_name, long_size = "", None
    for header, data in _headers(fd, path):
        if header.kind in _REGULAR:
            size = header.size if long_size is None else long_size
            yield File(long_name or header.name, data, size)
            long_name, long_size = "", None
        elif header.kind == b"L":
            record = _record(fd, header, data, path)
            long_name = text(record.split(b"\0")[0], path, offset=data)
        elif header.kind == b"x":
            name, long_size = pax(_record(fd, header, data, path), path, offset=data)
            long_name = name or long_name
        elif header.kind in _PASSED_OVER:
            long_name, long_size = ("", None) if header.kind == b"5" else (long_name, long_size)
        else:
            what = _REFUSED.get(header.kind, f"a member of unknown kind {header.kind!r}")
            raise TarError(
                f"{path}: '{header.name}' is {what}; a shard may hold regular files only. "
                "Write it again with tools/make_shards.py.",
                trouble="refused_member",
                offset=data - BLOCK,
            )


def _headers(fd: int, path: Path) -> Iterator[tuple[Header, int]]:
    """Every header and the offset of its data."""
    end, offset, pax_size = os.fstat(fd).st_size, 0, None
    while True:
        block = os.pread(fd, BLOCK, offset)
        if offset == 0:
            _check_start(block, path)
        if len(block) < BLOCK:
            found = (
                f"it stops at byte {end} without end blocks"
                if offset
                else f"it has {end} bytes, fewer than the header of a first member; is it a tar?"
            )
            raise damaged(path, found, "cut short", offset=end)
        if block == _ZEROS:
            _check_end(fd, offset, end, path)
            return
        header, data = parse_header(block, offset=offset, path=path), offset + BLOCK
        size = header.size if pax_size is None else pax_size
        if data + size > end:
            found = f"'{header.name}' at byte {offset} runs past the end"
            raise damaged(path, found, "cut short", offset=offset)
        yield header, data
        is_pax = header.kind == b"x"
        pax_size = pax(_record(fd, header, data, path), path, offset=data)[1] if is_pax else None
        offset = data + -(-size // BLOCK) * BLOCK


def _check_start(block: bytes, path: Path) -> None:
    if not block:
        raise TarError(
            f"{path} is empty (0 bytes); expected a tar of samples.", trouble="not_a_tar", offset=0
        )
    for magic, (name, command) in _COMPRESSED.items():
        if block.startswith(magic):
            raise TarError(
                f"{path} is compressed with {name}; shards are read by offset and must be plain "
                f"tars. Unpack it once: {command} {path}",
                trouble="not_a_tar",
                offset=0,
            )


def _check_end(fd: int, offset: int, end: int, path: Path) -> None:
    """At `offset` stands a block of zeros: an end of archive has two, and only zeros after."""
    if os.pread(fd, BLOCK, offset + BLOCK) != _ZEROS:
        raise damaged(path, f"a hole at byte {offset}, not an end of archive", offset=offset)
    if end - offset > _LONGEST_PADDING and not os.pread(fd, _LONGEST_PADDING, offset).strip(b"\0"):
        found = f"it ends in {end - offset} zero bytes"
        raise damaged(path, found, "not fully downloaded", offset=offset)
    if os.pread(fd, end - offset, offset).strip(b"\0"):
        found = f"data after the end of archive at byte {offset}"
        raise damaged(path, found, "two tars in one", offset=offset)


def _record(fd: int, header: Header, data: int, path: Path) -> bytes:
    if header.size > _LONGEST_NAME_RECORD:
        raise damaged(path, f"a name of {header.size} bytes at byte {data}", offset=data)
    return os.pread(fd, header.size, data)


def _split(file: File) -> Member | None:
    folder, slash, base = file.name.removeprefix("./").rpartition("/")
    stem, _, extension = base.partition(".")
    if not (stem and extension):
        return None
    return Member(folder + slash + stem, extension.lower(), file.offset, file.size)


def _check_neighbours(members: list[Member], path: Path) -> None:
    extensions, closed, current = set[str](), set[str](), ""
    for member in members:
        if member.key != current:
            closed.add(current)
            current = member.key
            extensions.clear()
        if current in closed:
            raise TarError(
                f"{path}: the members of sample '{current}' do not lie together. Sort the tar "
                "(tar --sort=name) or write it again with tools/make_shards.py.",
                trouble="duplicate_key",
                offset=member.offset,
                key=current,
            )
        if member.extension in extensions:
            raise TarError(
                f"{path} holds '{current}.{member.extension}' twice. Keys must be unique; write "
                "it again with tools/make_shards.py.",
                trouble="duplicate_key",
                offset=member.offset,
                key=current,
            )
        extensions.add(member.extension)
