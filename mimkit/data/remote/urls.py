"""Which addresses of shards are taken: those of known stores, and nothing that runs a program."""

import importlib.util
import re
from urllib.parse import urlsplit

from mimkit.data.braces import expand_braces
from mimkit.errors import UserError

_URL = re.compile(r"pipe:|[A-Za-z][A-Za-z0-9+.-]*://")
# Scheme -> the package that fsspec needs for it, and what installs that.
_PACKAGES = {
    "http": ("aiohttp", "'mimkit[remote]'"),
    "https": ("aiohttp", "'mimkit[remote]'"),
    "s3": ("s3fs", "'mimkit[remote]'"),
    "gs": ("gcsfs", "gcsfs"),
    "az": ("adlfs", "adlfs"),
    "abfs": ("adlfs", "adlfs"),
    "hf": ("huggingface_hub", "huggingface_hub"),
}


def is_url(name: str) -> bool:
    """Whether `name` is meant as an address, good or bad, and not as a path."""
    return _URL.match(name) is not None or "::" in name


def expand_url(pattern: str) -> list[str]:
    """The addresses of a brace pattern: `https://host/train-{000..012}.tar` are thirteen.

    Raises:
        UserError: braces that do not match, or an address that `check_url` refuses.
    """
    names = expand_braces(pattern) if "{" in pattern else [pattern]
    for name in names:
        check_url(name)
    return names


def check_url(name: str) -> None:
    """Raises UserError for an address that shards are not fetched from, and says why."""
    scheme, separator, rest = name.partition("://")
    if "::" in name or name.startswith("pipe:") or not separator:
        raise UserError(
            f"'{name}' is refused: shards are neither piped through programs nor through chains of "
            "protocols. Name a local tar, or the address of one, such as https://host/train-0.tar."
        )
    if scheme in ("file", "local"):
        raise UserError(f"'{name}' is refused; for a local tar leave {scheme}:// out: {rest}")
    if scheme not in _PACKAGES:
        raise UserError(
            f"'{name}' is refused: shards are fetched by {', '.join(_PACKAGES)} (in lower case), "
            f"not by '{scheme}'. Copy them to a local folder, and name that."
        )
    if re.search(r"[\s\\\x00-\x20\x7f]", name):
        raise UserError(f"{name!r} is refused: an address has no blanks and no backslashes.")
    if not (urlsplit(name).hostname and urlsplit(name).path.strip("/")):
        raise UserError(f"'{name}' is incomplete; expected {scheme}://HOST/FOLDER/NAME.tar.")
    if name.endswith("/") or set("*[") & set(rest):
        raise UserError(
            f"'{name}' names no single tar, and servers are not asked for lists; write a pattern "
            f"such as {scheme}://HOST/FOLDER/train-{{000..012}}.tar, or a list."
        )
    package, install = _PACKAGES[scheme]
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{scheme}:// needs the package {package}, which is not installed: pip install "
            f"{install}"
        )


def shown(url: str) -> str:
    """`url` for messages, without a password or the signature in its query."""
    parts = urlsplit(url)
    query = "?..." if parts.query else ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}{query}"


def parent(url: str) -> str:
    """The folder of `url`, with its last slash and without a query."""
    return url.partition("?")[0].rpartition("/")[0] + "/"


def base_name(url: str) -> str:
    """The last part of its path."""
    return urlsplit(url).path.rpartition("/")[2]


def beside(url: str, name: str) -> str:
    """The address of file `name` in the folder of `url`; a query is kept, as it may be a key."""
    query = url.partition("?")[2]
    return parent(url) + name + (f"?{query}" if query else "")
