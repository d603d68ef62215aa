"""OpenAI's published files, fetched when a command asks for it and never otherwise."""

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from mimkit.errors import UserError
from mimkit.files import atomic_file
from mimkit.tokenizers._dalle_weights import Part

_CHUNK = 1 << 20
_PATIENCE = 30  # seconds without a byte


@dataclass(frozen=True)
class Published:
    """A file at an address.

    The exact sizes of OpenAI's files are nowhere published. A pickle of the same weights that we
    made has 215,185,093 bytes (encoder) and 175,359,799 (decoder), so within 5 % of that is right.
    """

    url: str
    sizes: range


PUBLISHED: dict[Part, Published] = {
    "encoder": Published(
        "https://cdn.openai.com/dall-e/encoder.pkl", range(204_000_000, 226_000_000)
    ),
    "decoder": Published(
        "https://cdn.openai.com/dall-e/decoder.pkl", range(166_000_000, 184_000_000)
    ),
}


def download(
    published: Published, path: Path, *, progress: Callable[[int, int | None], None]
) -> None:
    """Fetches the file to `path`, wholly or not at all.

    Args:
        published: address and plausible sizes.
        path: of the file; it is replaced if it exists.
        progress: called with the bytes that are there, and with how many there will be if the
            server says so.

    Raises:
        UserError: no network, no such file, another size, an answer that breaks off, or a disk
            that cannot be written to.
    """
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        received = 0
        for chunk, total in _chunks(published):
            file.write(chunk)
            received += len(chunk)
            progress(received, total)
        file.flush()


def _chunks(published: Published) -> Iterator[tuple[bytes, int | None]]:
    """The answer in pieces, each with the length that was promised; checked at its end."""
    try:
        with urllib.request.urlopen(published.url, timeout=_PATIENCE) as answer:
            if urlsplit(answer.url).scheme != urlsplit(published.url).scheme:
                raise _failed(published, f"it leads to {answer.url}, which is not encrypted")
            total, received = answer.length, 0
            _check_size(published, total)
            while chunk := answer.read(_CHUNK):
                received += len(chunk)
                if received >= published.sizes.stop:
                    break
                yield chunk, total
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection
        reason = error.reason if type(error) is urllib.error.URLError else error
        raise _failed(published, str(reason) or type(error).__name__) from error
    if total is not None and received != total:
        raise _failed(published, f"the answer broke off after {received:,} of {total:,} bytes")
    _check_size(published, received)


def _check_size(published: Published, size: int | None) -> None:
    sizes = published.sizes
    if size is not None and size not in sizes:
        raise _failed(
            published,
            f"it has {size:,} bytes or more instead of {sizes.start:,} to {sizes.stop - 1:,}",
        )


def _failed(published: Published, reason: str) -> UserError:
    return UserError(
        f"cannot download {published.url}: {reason}; nothing half-written was left. Fetch that "
        "address by other means, and give the file: mimkit convert_dalle FILE OUT.safetensors"
    )
