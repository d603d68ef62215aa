"""DALL-E's weights out of every file they come in; one paragraph for everything that is not one."""

import copy
import json
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

from mimkit.errors import UserError
from mimkit.files import sha256
from mimkit.tokenizers._dalle_file import METADATA_KEY, convert_dalle, load_dalle

# What a module's __dict__ held under torch 1.7; everything younger is taken away.
TORCH_1_7 = ("training", "_parameters", "_buffers", "_non_persistent_buffers_set",
             "_backward_hooks", "_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks",
             "_load_state_dict_pre_hooks", "_modules")  # fmt: skip


def aged(network: nn.Module) -> nn.Module:
    """The same module as torch 1.7 would have pickled it: ordered dictionaries, fewer attributes.

    An `Upsample` of that age lacks `recompute_scale_factor`.
    """
    network = copy.deepcopy(network)
    for module in list(network.modules()):
        state = module.__dict__
        for name in [n for n in nn.Module().__dict__ if n not in TORCH_1_7]:
            del state[name]
        state.pop("recompute_scale_factor", None)
        for name, value in state.items():
            if type(value) is dict:
                state[name] = OrderedDict(value)
    return network


LAYOUTS = {
    "zip": {},
    "zip of another protocol": {"pickle_protocol": 4},
    "older": {"_use_new_zipfile_serialization": False},
}
Save = Callable[[Any, Path], None]


@pytest.fixture(params=LAYOUTS)
def save(request: pytest.FixtureRequest) -> Save:
    return lambda saved, path: torch.save(saved, path, **LAYOUTS[request.param])


def assert_equal(found: dict[str, Tensor], network: nn.Module) -> None:
    expected = network.state_dict()
    assert list(found) == list(expected)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
        assert found[name].is_contiguous()


@pytest.mark.parametrize("make_old", [False, True], ids=["today", "torch 1.7"])
def test_a_pickled_module_is_read_to_the_last_bit(
    save: Save, make_old: bool, dalle_encoder: nn.Module, dalle_decoder: nn.Module, tmp_path: Path
) -> None:
    for part, network in (("encoder", dalle_encoder), ("decoder", dalle_decoder)):
        path = tmp_path / f"{part}.pkl"
        save(aged(network) if make_old else network, path)
        loaded = load_dalle(path)
        assert (loaded.part, loaded.width, loaded.blocks, loaded.vocabulary) == (part, 16, 1, 64)
        assert_equal(loaded.weights, network)
        assert loaded.num_parameters == sum(weight.numel() for weight in network.parameters())


def test_an_aged_module_is_what_torch_itself_stumbles_over(
    dalle_decoder: nn.Module, tmp_path: Path
) -> None:
    old = aged(dalle_decoder)
    assert not hasattr(old.blocks.group_1.upsample, "recompute_scale_factor")
    assert type(old.blocks._modules) is OrderedDict
    torch.save(old, tmp_path / "decoder.pkl")
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        torch.load(tmp_path / "decoder.pkl", weights_only=True)
    word_BVyx = torch.zeros(1, 64, 2, 2)
    with pytest.raises(AttributeError):
        old(word_BVyx)
    with torch.no_grad():
        drawn = load_dalle(tmp_path / "decoder.pkl").network()(word_BVyx)
        assert torch.equal(drawn, dalle_decoder(word_BVyx))


def state_dicts(encoder: nn.Module) -> dict[str, Any]:
    weights = encoder.state_dict()
    return {
        "plain": weights,
        "dict": dict(weights),
        "below state_dict": {"state_dict": weights, "meta": {"epoch": 300, "time": "Mon"}},
        "with a prefix": {f"target_generator.{name}": weight for name, weight in weights.items()},
        "of parameters": dict(encoder.named_parameters()),
    }


@pytest.mark.parametrize("kind", state_dicts(nn.Identity()))
def test_a_state_dict_is_read_to_the_last_bit(
    kind: str, save: Save, dalle_encoder: nn.Module, tmp_path: Path
) -> None:
    save(state_dicts(dalle_encoder)[kind], tmp_path / "dalle_encoder.pth")
    assert_equal(load_dalle(tmp_path / "dalle_encoder.pth").weights, dalle_encoder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_precisions_become_fp32(
    dtype: torch.dtype, save: Save, dalle_encoder: nn.Module, tmp_path: Path
) -> None:
    stored = copy.deepcopy(dalle_encoder).to(dtype)
    save(stored, tmp_path / "encoder.pkl")
    weights = load_dalle(tmp_path / "encoder.pkl").weights
    assert_equal(weights, copy.deepcopy(stored).float())
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_views_into_larger_storages_are_cut_out(
    save: Save, dalle_encoder: nn.Module, tmp_path: Path
) -> None:
    weights = dalle_encoder.state_dict()
    blocks = "blocks.group_1.block_1.res_path"
    turned = weights[f"{blocks}.conv_1.w"].permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    assert not turned.is_contiguous()
    weights[f"{blocks}.conv_1.w"] = turned
    both = torch.cat([weights[f"{blocks}.conv_{i}.b"] for i in (1, 2)])
    weights |= {f"{blocks}.conv_1.b": both[:4], f"{blocks}.conv_2.b": both[4:]}
    save(dict(weights), tmp_path / "encoder.pth")
    assert_equal(load_dalle(tmp_path / "encoder.pth").weights, dalle_encoder)


def test_conversion_keeps_every_bit_and_says_where_it_is_from(
    dalle_file: Path, dalle_encoder: nn.Module, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "dalle.safetensors"
    written = convert_dalle(dalle_file, path)
    assert_equal(load_dalle(path).weights, dalle_encoder)
    assert written.sha256 == load_dalle(dalle_file).sha256 == load_dalle(path).sha256
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()[METADATA_KEY])
    assert header == {
        "format": 1, "part": "encoder", "width": 16, "blocks": 1, "vocabulary": 64,
        "weights_sha256": written.sha256, "source": dalle_file.name,
        "source_sha256": sha256(dalle_file),
    }  # fmt: skip
    assert path.stat().st_mode & 0o777 == 0o644
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_plain_safetensors_are_read_too(dalle_encoder: nn.Module, tmp_path: Path) -> None:
    safetensors.torch.save_file(dalle_encoder.state_dict(), tmp_path / "plain.safetensors")
    assert_equal(load_dalle(tmp_path / "plain.safetensors").weights, dalle_encoder)


def refusal(path: Path) -> str:
    """What the user reads: one paragraph that names the file and the way out."""
    with pytest.raises(UserError) as caught:
        load_dalle(path)
    message = str(caught.value)
    assert str(path) in message
    assert "mimkit convert_dalle" in message or "onvert" in message
    assert "\n" not in message and len(message) < 900
    return message


def test_weights_that_changed_after_the_conversion(dalle_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "dalle.safetensors"
    convert_dalle(dalle_file, path)
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    message = refusal(path)
    assert "not those that were written" in message and "convert encoder.pkl again" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [({"format": 2}, "format: "), ({"colour": 1}, "colour: "), ({"width": "16"}, "width: ")],
)
def test_a_header_of_another_version(
    change: dict[str, object], words: str, dalle_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "dalle.safetensors"
    convert_dalle(dalle_file, path)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()[METADATA_KEY])
    weights = safetensors.torch.load_file(path)
    safetensors.torch.save_file(weights, path, {METADATA_KEY: json.dumps(header | change)})
    assert words in refusal(path)


def test_a_failed_write_leaves_nothing(
    dalle_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(UserError, match="No space"):
        convert_dalle(dalle_file, tmp_path / "full.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.03, 0.2, 0.6, 0.99, 0.99999])
def test_a_file_that_is_cut_short(
    share: float, save: Save, dalle_encoder: nn.Module, tmp_path: Path
) -> None:
    path = tmp_path / "encoder.pkl"
    save(dalle_encoder, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    message = refusal(path)
    assert "cut short" in message or "no whole pickle" in message or "of torch.save" in message


@pytest.mark.parametrize("keep", [4, 100, 5_000, -1])
def test_safetensors_that_are_cut_short(keep: int, dalle_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "dalle.safetensors"
    convert_dalle(dalle_file, path)
    path.write_bytes(path.read_bytes()[:keep])
    assert "of torch.save" in refusal(path) if keep == 4 else "cut short" in refusal(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no file"),
        (b"", "is empty"),
        (b"<!DOCTYPE html><title>404</title>", "is text, .* it begins with '<!DOCTYPE html>"),
        (b"--2021-06-15-- https://cdn.openai.com", "the log of one"),
        (bytes(range(1, 256)), "neither safetensors nor a file of torch.save"),
        (b"PK\x03\x04" + bytes(200), "is damaged or cut short"),
        (struct.pack("<Q", 2**30) + b"{}", "can not be read as safetensors"),
    ],
    ids=["missing", "empty", "page", "log", "noise", "zip", "safetensors"],
)
def test_files_that_are_something_else(content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "encoder.pkl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=words):
        load_dalle(path)
    assert "--download encoder" in refusal(path)


def test_weights_that_do_not_fit_are_listed(dalle_encoder: nn.Module, tmp_path: Path) -> None:
    weights = {name: weight.clone() for name, weight in dalle_encoder.state_dict().items()}
    del weights["blocks.group_2.block_1.id_path.b"]
    weights["blocks.extra.w"] = torch.zeros(1)
    weights["blocks.input.b"] = torch.zeros(3)
    weights["blocks.output.conv.b"][0] = torch.inf
    torch.save(weights, tmp_path / "encoder.pth")
    message = refusal(tmp_path / "encoder.pth")
    for words in (
        "of DALL-E's encoder (width 16, blocks 1, vocabulary 64)",
        "blocks.group_2.block_1.id_path.b missing",
        "blocks.extra.w not used",
        "blocks.input.b of another shape",
        "blocks.output.conv.b not finite",
    ):
        assert words in message


def test_networks_of_another_kind(
    dalle_encoder: nn.Module, tokenizer_file: Path, tmp_path: Path
) -> None:
    torch.save({f"layer.{i}.weight": torch.zeros(2) for i in range(9)}, tmp_path / "vit.pth")
    message = refusal(tmp_path / "vit.pth")
    assert "0 networks" in message and "layer.3.weight and 5 more" in message
    assert "2 networks" in refusal(tokenizer_file)
    assert "tokenizer=dvae" in refusal(tokenizer_file)
    weights = dict(dalle_encoder.state_dict())
    weights["blocks.input.w"] = torch.zeros(18, 3, 7, 7)
    torch.save(weights, tmp_path / "odd.pth")
    assert "has shape (18, 3, 7, 7)" in refusal(tmp_path / "odd.pth")
