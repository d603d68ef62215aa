"""Files on servers by their address, through fsspec: what is known of one, and its bytes.

Filesystem objects are asked for anew in every call: fsspec keeps them, and makes new ones in a
forked process, where the threads of the old ones are gone.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mimkit.data.remote.retry import TransientError
from mimkit.data.remote.urls import shown
from mimkit.errors import UserError

_TIMEOUT = 120  # seconds for one answer; of 16 MiB that is 140 kB/s
_LOOK_TIMEOUT = 20  # for what a server says of a file
_FOUND_IN = ("ETag", "etag", "Last-Modified", "LastModified", "last_modified", "updated", "mtime",
             "blob_id")  # what tells versions apart, by store; the first that is there  # fmt: skip
# Their exceptions have no common base.
_NETWORK = ("aiobotocore", "aiohttp", "adlfs", "azure", "botocore", "fsspec", "gcsfs", "google",
            "httpx", "huggingface_hub", "requests", "s3fs", "urllib3")  # fmt: skip
_PASSING = (408, 425, 429)  # too slow, too early, too often
_ABSENT = (401, 403, 404, 410)


class AbsentError(UserError):
    """The server has no such file, or not for us."""


@dataclass(frozen=True)
class RemoteFile:
    """A file on a server as it was when it was looked at. `str` is its address for messages."""

    url: str
    size: int  # bytes
    version: str  # its ETag, else when it was changed; "" where the server tells neither

    def __str__(self) -> str:
        return shown(self.url)


def look(url: str) -> RemoteFile:
    """Asks the server about a file. Raises AbsentError, UserError and TransientError."""
    with _errors(url):
        filesystem, patience = _filesystem(url)
        filesystem.invalidate_cache()  # some keep what they heard in a listing
        if patience:
            patience = {"timeout": _LOOK_TIMEOUT}
        info = filesystem.info(url, **patience)
    if info.get("type") != "file" or not isinstance(info.get("size"), int):
        raise UserError(
            f"the server does not say how long {shown(url)} is (its answer has no Content-Length); "
            "shards are fetched from servers that do, or from a local copy."
        )
    version = next((str(info[key]) for key in _FOUND_IN if info.get(key)), "")
    return RemoteFile(url, info["size"], version.removeprefix("W/"))


def read(file: RemoteFile, start: int, end: int) -> bytes:
    """Bytes `start` to `end` - 1; all from `start` on where the server sends whole files only.

    Raises AbsentError, UserError and TransientError.
    """
    with _errors(file.url):
        filesystem, options = _filesystem(file.url)
        if file.url.startswith("http"):
            options = {**options, "headers": {"Accept-Encoding": "identity"}}
        content: bytes = filesystem.cat_file(file.url, start=start, end=end, **options)
    if len(content) == end - start:
        return content
    if len(content) == file.size:
        return content[start:]
    raise TransientError(f"{len(content)} bytes came where {end - start} were asked for")


def read_whole(url: str, *, limit: int) -> bytes | None:
    """A small file; None where there is none, or it is longer than `limit` bytes.

    Raises UserError and TransientError.
    """
    try:
        file = look(url)
        return read(file, 0, file.size) if 0 < file.size <= limit else None
    except AbsentError:
        return None


def _filesystem(url: str) -> tuple[Any, dict[str, Any]]:
    """fsspec's object for the scheme of `url`, and the arguments that limit its time."""
    from fsspec.core import url_to_fs

    filesystem, _ = url_to_fs(url)
    return filesystem, {"timeout": _TIMEOUT} if filesystem.async_impl else {}


@contextlib.contextmanager
def _errors(url: str) -> Iterator[None]:
    """Turns what went wrong between us and the server into one of three errors."""
    try:
        yield
    except Exception as error:  # of whichever package; what is not the network's goes on as it is
        root = type(error).__module__.partition(".")[0]
        if not (isinstance(error, OSError | TimeoutError) or root in (*_NETWORK, "asyncio")):
            raise
        raise _verdict(error, url) from error


def _verdict(error: Exception, url: str) -> Exception:
    # fsspec's http reports every failure of `info` as a missing file
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
    cause = cause if isinstance(cause, Exception) else error
    status = _status(cause)
    text = f"{type(cause).__name__} {cause}".replace(url, shown(url)).strip()
    if status in _ABSENT or "Credential" in type(cause).__name__:
        answer = f"answers {status}" if status else f"was not asked: {text}"
        return AbsentError(
            f"{shown(url)} cannot be fetched: the server {answer}. Check the address, the numbers "
            "in its braces, and that you may read it."
        )
    if status is not None and 400 <= status < 500 and status not in _PASSING:
        return UserError(f"{shown(url)} cannot be fetched: the server answers {status} ({text}).")
    return TransientError(text)


def _status(error: Exception) -> int | None:
    """HTTP's code, whatever the package calls it; None where nothing was answered."""
    if isinstance(error, FileNotFoundError):
        return 404
    if isinstance(error, PermissionError):
        return 403
    for name in ("status", "code"):
        found = getattr(error, name, None)
        if isinstance(found, int | str) and str(found).isdigit():
            return int(found)
    return None
