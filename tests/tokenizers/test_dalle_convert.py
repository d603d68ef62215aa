"""`mimkit convert_dalle` as it is typed: files in, a safetensors file and what it says out."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ROOT, command
from torch import nn

from mimkit.cli import main
from mimkit.tokenizers import _dalle_download
from mimkit.tokenizers._dalle_download import Published
from mimkit.tokenizers._dalle_file import load_dalle
from mimkit.tokenizers.dalle import DalleTokenizer


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the embedded photographs are cut into, once."""
    return f"--cache-dir={tmp_path_factory.mktemp('cache')}"


def test_an_encoder_is_converted_and_its_precisions_are_compared(
    dalle_file: Path, cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "dalle.safetensors"
    assert main(["convert_dalle", str(dalle_file), str(out), cache]) == 0
    said = capsys.readouterr().out
    weights = load_dalle(out)
    assert f"wrote {out}: DALL-E's encoder, width 16, 1 blocks a group, 64 words" in said
    assert weights.sha256 in said
    shares = re.search(r"differ from fp32's on 8 held-out photographs: bf16 ([\d.]+)%", said)
    assert shares is not None and 0 < float(shares[1]) < 20
    assert re.search(r"fp16 ([\d.]+%|not compared)", said)
    settings = dict(re.findall(r"tokenizer\.(\w+)=(\S+)", said.splitlines()[-1]))
    tokenizer = DalleTokenizer(**settings)
    assert tokenizer.fingerprint == DalleTokenizer(path=str(dalle_file)).fingerprint


def test_the_check_can_be_left_out(
    dalle_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert-dalle", str(dalle_file), str(tmp_path / "a.safetensors"), "--skip-check"]
    assert main([*words, f"--cache-dir={tmp_path / 'cache'}"]) == 0
    assert "differ" not in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_file_that_is_there_is_replaced_only_if_asked(
    dalle_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.safetensors"
    out.write_bytes(b"somebody's")
    words = ["convert_dalle", str(dalle_file), str(out), "--skip-check"]
    assert main(words) == 2 and out.read_bytes() == b"somebody's"
    assert "a.safetensors exists; --overwrite" in " ".join(capsys.readouterr().err.split())
    assert main([*words, "--overwrite"]) == 0
    assert load_dalle(out).part == "encoder"


def test_a_decoder_is_converted(
    dalle_decoder: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(dalle_decoder, tmp_path / "decoder.pkl")
    out = tmp_path / "decoder.safetensors"
    assert main(["convert_dalle", str(tmp_path / "decoder.pkl"), str(out)]) == 0
    assert f"tokenizer.decoder={out}" in capsys.readouterr().out
    assert load_dalle(out).part == "decoder"


def test_a_download_is_kept_and_converted(
    dalle_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def download(
        published: Published, path: Path, *, progress: Callable[[int, int | None], None]
    ) -> None:
        assert published.url == "https://cdn.openai.com/dall-e/encoder.pkl"
        path.write_bytes(dalle_file.read_bytes())
        progress(path.stat().st_size, path.stat().st_size)

    monkeypatch.setattr(_dalle_download, "download", download)
    out = tmp_path / "dalle.safetensors"
    assert main(["convert_dalle", "--download", "encoder", str(out), "--skip-check"]) == 0
    assert f"fetched {tmp_path / 'encoder.pkl'}" in capsys.readouterr().out
    assert {file.name for file in tmp_path.iterdir()} == {"encoder.pkl", "dalle.safetensors"}
    assert load_dalle(out).sha256 == load_dalle(dalle_file).sha256


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["OUT.safetensors"], "give one source"),
        (["--download", "encoder", "SRC", "OUT.safetensors"], "give one source"),
        (["SRC", "OUT.pkl"], "end it in .safetensors"),
        (["SRC", "OUT.safetensors"], "there is no file 'SRC' with DALL-E's weights"),
    ],
)
def test_what_is_typed_wrong_is_said(
    words: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["convert_dalle", *words]) == 2
    assert complaint in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


def test_the_tool_refuses_a_trap_in_one_paragraph(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save(Trap(), tmp_path / "encoder.pkl")
    words = [ROOT / "tools" / "convert_dalle.py", "encoder.pkl", "out.safetensors"]
    ended = command(words, cwd=tmp_path)
    said = " ".join(ended.err.split())
    assert ended.code == 2 and "Traceback" not in said
    assert "nothing in it was executed: its pickle asks for 'posix.mkdir'" in said
    assert [file.name for file in tmp_path.iterdir()] == ["encoder.pkl"]
