"""The download, from a server on this machine: all of the file, or nothing and what to do then."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mimkit.errors import UserError
from mimkit.tokenizers._dalle_download import PUBLISHED, Published, download

CONTENT = bytes(range(256)) * 12_000  # 3 MB, three pieces
PLAUSIBLE = range(len(CONTENT) - 1000, len(CONTENT) + 1000)


class Answers(BaseHTTPRequestHandler):
    """What is asked for decides how the answer fails."""

    def do_GET(self) -> None:
        kind = self.path.strip("/")
        if kind == "missing":
            self.send_error(404)
            return
        if kind == "moved":
            self.send_response(302)
            self.send_header("Location", "/whole")
            self.end_headers()
            return
        body = {"page": b"<html>", "endless": CONTENT * 2}.get(kind, CONTENT)
        self.send_response(200)
        if kind not in ("unannounced", "endless", "short"):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: 2_000_000 if kind in ("truncated", "short") else None])

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()
        thread.join()


def fetch(url: str, path: Path) -> list[tuple[int, int | None]]:
    """Downloads, and returns what the progress bar was told."""
    steps: list[tuple[int, int | None]] = []
    download(Published(url, PLAUSIBLE), path, progress=lambda *step: steps.append(step))
    return steps


@pytest.mark.parametrize("kind", ["whole", "moved"])
def test_a_whole_answer_is_written_and_counted(kind: str, server: str, tmp_path: Path) -> None:
    steps = fetch(f"{server}/{kind}", tmp_path / "new" / "encoder.pkl")
    assert (tmp_path / "new" / "encoder.pkl").read_bytes() == CONTENT
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["encoder.pkl"]
    assert steps[-1] == (len(CONTENT), len(CONTENT)) and len(steps) >= 3
    assert steps == sorted(steps)


def test_an_answer_without_a_length_is_judged_by_its_size(server: str, tmp_path: Path) -> None:
    steps = fetch(f"{server}/unannounced", tmp_path / "encoder.pkl")
    assert (tmp_path / "encoder.pkl").read_bytes() == CONTENT
    assert steps[-1] == (len(CONTENT), None)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("truncated", "broke off after 2,000,000 of 3,072,000 bytes"),
        ("short", "has 2,000,000 bytes or more instead of 3,071,000 to 3,072,999"),
        ("endless", "bytes or more instead of 3,071,000 to 3,072,999"),
        ("page", "has 6 bytes or more instead of"),
        ("missing", "HTTP Error 404"),
    ],
)
@pytest.mark.parametrize("there_before", [False, True])
def test_anything_else_leaves_what_was_there(
    kind: str, words: str, there_before: bool, server: str, tmp_path: Path
) -> None:
    path, url = tmp_path / "encoder.pkl", f"{server}/{kind}"
    if there_before:
        path.write_bytes(b"an older one")
    with pytest.raises(UserError) as caught:
        fetch(url, path)
    message = str(caught.value)
    assert words in message
    assert f"cannot download {url}: " in message
    assert "mimkit convert_dalle FILE OUT.safetensors" in message
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"an older one"] * there_before


def test_no_server(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/encoder.pkl"
        with pytest.raises(UserError, match=r"Connection refused; nothing half-written was left"):
            fetch(url, tmp_path / "encoder.pkl")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_not_taken_for_the_network(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(UserError, match=r"cannot write .*No space left on device"):
        fetch(f"{server}/whole", tmp_path / "encoder.pkl")
    assert list(tmp_path.iterdir()) == []


def test_an_encrypted_address_may_not_lead_to_an_open_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Answer(SimpleNamespace):
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            """Closes nothing."""

    elsewhere = Answer(url="http://elsewhere/encoder.pkl", length=len(CONTENT))
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: elsewhere)
    with pytest.raises(UserError, match=r"leads to http://elsewhere/.*which is not encrypted"):
        fetch("https://there/encoder.pkl", tmp_path / "encoder.pkl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("part", "size"), [("encoder", 215_185_093), ("decoder", 175_359_799)])
def test_the_published_files(part: Any, size: int) -> None:
    """Sizes of pickles of the same shapes (facts of the paper, 6.4)."""
    assert PUBLISHED[part].url == f"https://cdn.openai.com/dall-e/{part}.pkl"
    assert size in PUBLISHED[part].sizes
    assert size // 2 not in PUBLISHED[part].sizes and size * 11 // 10 not in PUBLISHED[part].sizes
