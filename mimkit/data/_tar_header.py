"""One 512-byte header of a tar, and the records that carry names too long for it.

Formats: POSIX.1-2001 ustar and pax; GNU tar (its manual, "Basic Tar Format").
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mimkit.errors import UserError

BLOCK = 512  # bytes; everything in a tar starts at a multiple of it
Trouble = Literal["damaged_tar", "not_a_tar", "refused_member", "duplicate_key", "unreadable"]


class TarError(UserError):
    """A tar that is not whole, or holds what a shard may not.

    Attributes:
        trouble: of which kind.
        offset: where in the file, in bytes; None where no place is to blame.
        key: of the sample that is to blame, "" where it is none.
    """

    def __init__(
        self,
        message: str,
        *,
        trouble: Trouble = "damaged_tar",
        offset: int | None = None,
        key: str = "",
    ) -> None:
        super().__init__(message)
        self.trouble, self.offset, self.key = trouble, offset, key


@dataclass(frozen=True)
class Header:
    name: str
    kind: bytes  # the type flag: b"0" a regular file, b"5" a directory, ...
    size: int  # of the data that follows, in bytes


def parse_header(block: bytes, *, offset: int, path: Path) -> Header:
    """Raises TarError where the checksum or the size is wrong."""
    stored = _octal(block[148:156])
    if stored != sum(block[:148]) + sum(block[156:]) + 8 * ord(" "):
        if offset == 0 and block[257:262] != b"ustar":
            raise TarError(f"{path} is not a tar (it begins with {block[:16]!r}).",
                           trouble="not_a_tar", offset=0)  # fmt: skip
        raise damaged(path, f"bad header checksum at byte {offset}", offset=offset)
    size = _number(block[124:136])
    if size is None:
        raise damaged(path, f"bad member size at byte {offset}", offset=offset)
    name = block[:100].split(b"\0")[0]
    if block[257:263] == b"ustar\0" and block[345]:  # GNU's magic is "ustar  ": no prefix there
        name = block[345:500].split(b"\0")[0] + b"/" + name
    return Header(text(name, path, offset=offset), block[156:157], size)


def pax(record: bytes, path: Path, *, offset: int) -> tuple[str, int | None]:
    """`path` ("" if absent) and `size` of a pax header: lines of "LENGTH KEYWORD=VALUE\\n"."""
    name, size = "", None
    while record:
        length = record.split(b" ", 1)[0]
        if not _is_number(length) or not len(length) < int(length) <= len(record):
            raise damaged(path, f"a pax header {record[:40]!r}", offset=offset)
        line, record = record[: int(length)], record[int(length) :]
        keyword, _, value = line[len(length) + 1 : -1].partition(b"=")
        if keyword.startswith(b"GNU.sparse"):
            raise TarError(
                f"{path} holds a sparse file; a shard may hold regular files only.",
                trouble="refused_member",
                offset=offset,
            )
        if keyword == b"path":
            name = text(value, path, offset=offset)
        elif keyword == b"size":
            if not _is_number(value):
                raise damaged(path, f"a pax size of {value[:40]!r}", offset=offset)
            size = int(value)
    return name, size


def _is_number(digits: bytes) -> bool:
    """Of bytes: Python refuses to read thousands of digits, and no file has so many."""
    return digits.isdigit() and len(digits) <= 20


def text(name: bytes, path: Path, *, offset: int) -> str:
    """A member's name. Raises TarError where it is not UTF-8."""
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise TarError(
            f"{path}: the member name {name!r} is not UTF-8.",
            trouble="refused_member",
            offset=offset,
        ) from error


def damaged(path: Path, found: str, verdict: str = "damaged", *, offset: int) -> TarError:
    """The error for a tar that is not whole."""
    return TarError(
        f"{path} is {verdict}: {found}. Fetch it again or write it again with "
        "tools/make_shards.py.",
        offset=offset,
    )


def _octal(field: bytes) -> int | None:
    digits = field.split(b"\0")[0].strip()
    return int(digits or b"0", 8) if all(48 <= digit < 56 for digit in digits) else None


def _number(field: bytes) -> int | None:
    """Octal digits, or base 256 for members above 8 GB."""
    return int.from_bytes(field[1:], "big") if field[0] == 0x80 else _octal(field)
