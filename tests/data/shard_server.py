"""A web server on loopback that serves a folder, counts what is asked for, and misbehaves."""

import contextlib
import hashlib
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from mimkit.data.remote.cache import ShardCache
from mimkit.data.remote.retry import Patience
from mimkit.data.remote.space import Space

PIECE = 4096  # bytes of a request in tests; their shards have some ten of them
Fault = Callable[["Handler", bytes], None]  # answers in its own way instead of with these bytes


@dataclass
class ShardServer:
    """What a test tells the server, and what the server heard.

    Attributes:
        faults: for the next requests for bytes of a tar, one each; None answers well.
        versions: ETags by file name; the hash of the content where none is given.
        ranges: whether it answers with the bytes that were asked for, or always with all.
        gets: file name and first byte of every request for bytes.
        heads: file names that were looked at.
    """

    folder: Path
    address: str = ""
    ranges: bool = True
    faults: deque[Fault | None] = field(default_factory=deque)
    versions: dict[str, str] = field(default_factory=dict)
    gets: list[tuple[str, int]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)

    def url(self, name: str) -> str:
        return f"{self.address}/{name}"

    def starts(self, name: str) -> list[int]:
        """The first bytes of what was asked for of a file."""
        return [start for asked, start in self.gets if asked == name]

    def version(self, path: Path) -> str:
        return self.versions.get(path.name) or hashlib.md5(path.read_bytes()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: ClassVar[ShardServer]

    def do_HEAD(self) -> None:
        path = self._path()
        self.state.heads.append(path.name)
        if path.is_file():
            self.head(200, path.stat().st_size)
        else:
            self.refuse(404)

    def do_GET(self) -> None:
        path = self._path()
        if not path.is_file():
            self.refuse(404)
            return
        content = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, end = (int(asked[1]), int(asked[2]) + 1) if asked else (0, len(content))
        self.state.gets.append((path.name, start))
        faults = self.state.faults
        fault = faults.popleft() if faults and path.suffix == ".tar" else None
        if not (asked and self.state.ranges):
            start, end = 0, len(content)
        (fault or answer)(self, content[start:end])

    def head(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        if self._path().is_file():
            self.send_header("ETag", f'"{self.state.version(self._path())}"')
        self.end_headers()

    def refuse(self, status: int) -> None:
        self.head(status, 0)

    def _path(self) -> Path:
        return self.state.folder / self.path.partition("?")[0].lstrip("/")

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""


def answer(handler: Handler, content: bytes) -> None:
    handler.head(206 if handler.state.ranges else 200, len(content))
    with contextlib.suppress(ConnectionError):  # the client was killed
        handler.wfile.write(content)


def drop(handler: Handler, content: bytes) -> None:
    """Closes the connection in the middle of what it announced."""
    handler.head(206, len(content))
    handler.wfile.write(content[: len(content) // 2])
    handler.close_connection = True


def truncate(handler: Handler, content: bytes) -> None:
    """Sends half, and says that this is all."""
    answer(handler, content[: len(content) // 2])


def flip(handler: Handler, content: bytes) -> None:
    """As long as it should be, but with a wrong byte."""
    answer(handler, bytes([content[0] ^ 1]) + content[1:])


def compress(handler: Handler, content: bytes) -> None:
    """Packs what it sends if it may; ranges are then of what is packed."""
    may = "gzip" in handler.headers.get("Accept-Encoding", "")
    answer(handler, content[:100] if may else content)


def status(code: int) -> Fault:
    return lambda handler, content: handler.refuse(code)


@dataclass
class Gate:
    """Lets a test act in the middle of an answer."""

    reached: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)

    def __call__(self, handler: Handler, content: bytes) -> None:
        self.reached.set()
        assert self.release.wait(60)
        answer(handler, content)


class _Server(ThreadingHTTPServer):
    def handle_error(self, *about: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client was killed
            super().handle_error(*about)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[ShardServer]:
    state = ShardServer(folder)
    handler = type("Handler", (Handler,), {"state": state})
    server = _Server(("127.0.0.1", 0), handler)
    state.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def make_cache(folder: Path, *, limit: int | None = None, tries: int = 3) -> ShardCache:
    """Small pieces, and no waiting between tries."""
    folder.mkdir(parents=True, exist_ok=True)
    patience = Patience(tries=tries, sleep=_no_sleep)
    return ShardCache(space=Space(folder=folder, limit=limit), patience=patience, piece=PIECE)


def _no_sleep(seconds: float) -> None:
    """Waiting is for servers that need it."""
