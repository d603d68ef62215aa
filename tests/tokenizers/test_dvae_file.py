"""The tokenizer file: a round trip, and one paragraph for everything that is not one."""

import json
import pickle
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from mimkit.errors import UserError
from mimkit.tokenizers import TOKENIZERS
from mimkit.tokenizers._dvae_file import METADATA_KEY, load_dvae, save_dvae
from mimkit.tokenizers._dvae_model import Dvae


@pytest.fixture
def good(tmp_path: Path, varied_dvae: Dvae) -> Path:
    path = tmp_path / "good.safetensors"
    save_dvae(path, varied_dvae, settings={"steps": 3}, half=False)
    return path


def refusal(path: Path) -> str:
    """What the user reads: one paragraph that names the file and the way out."""
    with pytest.raises(UserError) as caught:
        TOKENIZERS["dvae"](path=str(path))
    message = str(caught.value)
    assert str(path) in message and "tools/train_tokenizer.py" in message
    assert "\n" not in message and len(message) < 900
    return message


def test_round_trip_is_bit_equal(good: Path, varied_dvae: Dvae) -> None:
    loaded, settings = load_dvae(good)
    for name, weight in varied_dvae.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    assert (settings.width, settings.blocks, settings.vocabulary) == (16, 1, 64)
    assert settings.training == {"steps": 3}


def test_layout_in_memory_does_not_reach_the_file(tmp_path: Path, good: Path) -> None:
    loaded, _ = load_dvae(good)
    path = tmp_path / "again.safetensors"
    loaded.to(memory_format=torch.channels_last)
    save_dvae(path, loaded, settings={"steps": 3}, half=False)
    assert path.read_bytes() == good.read_bytes()


def test_half_keeps_nearly_every_word(tmp_path: Path, good: Path, photos: Tensor) -> None:
    half = tmp_path / "half.safetensors"
    save_dvae(half, load_dvae(good)[0], settings={}, half=True)
    assert half.stat().st_size < 0.55 * good.stat().st_size
    exact, rounded = (TOKENIZERS["dvae"](path=str(path)) for path in (good, half))
    assert all(weight.dtype == torch.float32 for weight in rounded.parameters())
    same_BN = exact.encode(photos) == rounded.encode(photos)
    assert same_BN.float().mean() > 0.97
    assert exact.fingerprint != rounded.fingerprint


def test_a_failed_write_leaves_nothing(
    tmp_path: Path, varied_dvae: Dvae, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(UserError, match="No space"):
        save_dvae(tmp_path / "full.safetensors", varied_dvae, settings={}, half=True)
    assert list(tmp_path.iterdir()) == []


def test_missing_file_says_what_exists(good: Path) -> None:
    assert "good.safetensors" in refusal(good.with_name("typo.safetensors"))
    assert "does not exist either" in refusal(good.parent / "nowhere" / "x.safetensors")


def test_text_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "page.safetensors"
    path.write_text("<!DOCTYPE html>\n<title>404 Not Found</title>")
    assert "is text" in refusal(path) and "<!DOCTYPE html>" in refusal(path)


def test_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.safetensors"
    path.touch()
    assert "is empty" in refusal(path)


class Trap:
    """Unpickling this writes a file: the proof that nobody did."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.write_text, (self.proof, "the pickle ran")


@pytest.mark.parametrize("suffix", [".pkl", ".pth", ".safetensors"])
@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_are_refused_and_do_not_run(tmp_path: Path, suffix: str, zipped: bool) -> None:
    path, proof = tmp_path / f"trap{suffix}", tmp_path / "proof"
    if zipped:
        torch.save(Trap(proof), path)
    else:
        path.write_bytes(pickle.dumps(Trap(proof)))
    assert "never unpickles" in refusal(path)
    assert not proof.exists()


@pytest.mark.parametrize("keep", [4, 100, 5_000, -1])
def test_truncated_file(good: Path, keep: int) -> None:
    good.write_bytes(good.read_bytes()[:keep])
    assert "cut short" in refusal(good)


def test_safetensors_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "bert.safetensors"
    safetensors.torch.save_file({f"bert.layer.{i}": torch.zeros(1) for i in range(9)}, path)
    message = refusal(path)
    assert METADATA_KEY in message and "bert.layer.0" in message and "and 5 more" in message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"format": 2, "width": 16, "blocks": 1, "vocabulary": 64}, "format"),
        ({"width": "16", "blocks": 1, "vocabulary": 64}, "width"),
        ({"width": 16, "blocks": 1, "vocabulary": 64, "colour": 1}, "colour"),
        ({"width": 16, "blocks": 10**9, "vocabulary": 64}, "blocks"),
        ("not an object", "settings: Input should"),
    ],
)
def test_settings_of_another_kind(good: Path, settings: object, words: str) -> None:
    weights = safetensors.torch.load_file(good)
    safetensors.torch.save_file(weights, good, {METADATA_KEY: json.dumps(settings)})
    assert words in refusal(good)


def test_weights_that_do_not_fit_are_listed(good: Path) -> None:
    weights = safetensors.torch.load_file(good)
    weights["extra.w"] = torch.zeros(1)
    del weights["encoder.blocks.input.b"]
    weights["decoder.blocks.input.b"] = torch.zeros(3)
    weights["encoder.blocks.input.w"][0] = torch.nan
    settings = {"width": 16, "blocks": 1, "vocabulary": 64}
    safetensors.torch.save_file(weights, good, {METADATA_KEY: json.dumps(settings)})
    message = refusal(good)
    for words in (
        "encoder.blocks.input.b missing",
        "extra.w not used",
        "decoder.blocks.input.b of another shape",
        "encoder.blocks.input.w not finite",
    ):
        assert words in message


def test_a_header_length_that_begins_like_a_pickle(tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.ljust(0x280)
    path = tmp_path / "foreign.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"0")
    assert path.read_bytes().startswith(pickle.dumps(None, protocol=2)[:2])
    assert "something else" in refusal(path)


def test_a_header_that_promises_too_much(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    path.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    assert "can not be read as safetensors" in refusal(path)
