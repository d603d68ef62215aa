"""DALL-E's tokenizer: dall_e's own numbers, pictures, precisions, the two halves of the dVAE."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dall_e import Decoder, Encoder, map_pixels, unmap_pixels
from torch import Tensor, nn

from mimkit.build import make_part
from mimkit.config import PartConfig
from mimkit.errors import UserError
from mimkit.tokenizers import TOKENIZERS
from mimkit.tokenizers import dalle as dalle_part
from mimkit.tokenizers._dalle_file import convert_dalle
from mimkit.tokenizers.dalle import DalleTokenizer, is_slow, precision_differences

CPU = torch.device("cpu")


@pytest.fixture
def fp16_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dalle_part, "is_slow", lambda precision, device: False)


@pytest.fixture(scope="module")
def decoder_file(dalle_decoder: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dalle") / "decoder.pkl"
    torch.save(dalle_decoder, path)
    return path


def likeliest(encoder: nn.Module, view_BChw: Tensor) -> Tensor:
    """What unilm's BEiT does with dall_e's own module: map_pixels, forward, argmax."""
    with torch.no_grad():
        return encoder(map_pixels(view_BChw)).argmax(dim=1).flatten(1)


def test_words_are_those_of_dall_e(
    dalle_file: Path, dalle_encoder: nn.Module, photos: Tensor
) -> None:
    tokenizer = DalleTokenizer(path=str(dalle_file))
    target_BN = tokenizer.encode(photos)
    assert torch.equal(target_BN, likeliest(dalle_encoder, photos))
    assert len(target_BN.unique()) > 20
    assert (tokenizer.grid(112, 112), tokenizer.grid(224, 224)) == ((14, 14), (28, 28))


@pytest.mark.slow
def test_the_published_size(tmp_path: Path, photos: Tensor) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = Encoder()
    assert len(encoder.state_dict()) == 74
    assert sum(weight.numel() for weight in encoder.parameters()) == 53_786_240
    view_BChw = nn.functional.interpolate(photos[:2], size=112, mode="bicubic").clamp(0, 1)
    with torch.no_grad():  # fresh weights give one word nearly everywhere: centre the logits
        output = encoder.blocks.output.conv
        output.b.sub_(encoder(map_pixels(view_BChw)).mean((0, 2, 3)))
    torch.save(encoder, tmp_path / "encoder.pkl", _use_new_zipfile_serialization=False)
    assert abs((tmp_path / "encoder.pkl").stat().st_size - 215_185_093) < 100_000
    tokenizer = DalleTokenizer(path=str(tmp_path / "encoder.pkl"))
    assert tokenizer.vocabulary == tokenizer.prediction_dim == 8192
    assert sum(weight.numel() for weight in tokenizer.parameters()) == 53_786_240
    target_BN = tokenizer.encode(view_BChw)
    assert target_BN.shape == (2, 14 * 14)
    assert len(target_BN.unique()) > 40
    assert torch.equal(target_BN, likeliest(encoder, view_BChw))


def test_pictures_are_the_first_three_channels_unmapped(
    dalle_file: Path, decoder_file: Path, dalle_decoder: nn.Module, photos: Tensor
) -> None:
    tokenizer = DalleTokenizer(path=str(dalle_file), decoder=str(decoder_file))
    assert tokenizer.can_decode
    target_BN = tokenizer.encode(photos[:3])
    word_BVyx = nn.functional.one_hot(target_BN.view(3, 8, 8), 64).permute(0, 3, 1, 2).float()
    with torch.no_grad():
        expected = unmap_pixels(torch.sigmoid(dalle_decoder(word_BVyx)[:, :3]))
    image_BChw = tokenizer.decode(target_BN, (8, 8))
    torch.testing.assert_close(image_BChw, expected, rtol=0, atol=1e-6)
    assert image_BChw.std() > 0.01
    assert not any(parameter.requires_grad for parameter in tokenizer.parameters())


def test_without_a_decoder_only_the_encoder_takes_memory(
    dalle_file: Path, dalle_encoder: nn.Module
) -> None:
    tokenizer = DalleTokenizer(path=str(dalle_file))
    weights = [*tokenizer.parameters(), *tokenizer.buffers()]
    assert len(weights) == len(dalle_encoder.state_dict())
    assert all(weight.device == CPU and weight.dtype == torch.float32 for weight in weights)
    assert not tokenizer.can_decode
    with pytest.raises(UserError, match=r"set tokenizer\.decoder"):
        tokenizer.decode(torch.zeros(1, 4, dtype=torch.int64), (2, 2))


def computed_in(tokenizer: DalleTokenizer, view_BChw: Tensor) -> list[torch.dtype]:
    """The dtypes of the first convolution's output and of the logits."""
    seen: list[torch.dtype] = []

    def look(module: nn.Module, inputs: Any, output: Tensor) -> None:
        seen.append(output.dtype)

    blocks = tokenizer.encoder.blocks
    hooks = [module.register_forward_hook(look) for module in (blocks.input, blocks.output)]
    tokenizer.encode(view_BChw)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.usefixtures("fp16_is_fast")
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_all_but_the_logits_are_computed_in_the_precision(
    dalle_file: Path, photos: Tensor, precision: dalle_part.Precision, dtype: torch.dtype
) -> None:
    tokenizer = DalleTokenizer(path=str(dalle_file), precision=precision)
    assert computed_in(tokenizer, photos) == [dtype, torch.float32]
    exact = DalleTokenizer(path=str(dalle_file))
    same = (tokenizer.encode(photos) == exact.encode(photos)).float().mean()
    assert same > 0.9
    with torch.autocast("cpu", dtype=torch.bfloat16):  # that of the encoder's training
        assert computed_in(tokenizer, photos) == [dtype, torch.float32]


@pytest.mark.usefixtures("fp16_is_fast")
def test_differences_of_the_precisions_are_counted(dalle_file: Path, photos: Tensor) -> None:
    tokenizer = DalleTokenizer(path=str(dalle_file))
    differences = precision_differences(tokenizer, photos, ["fp32", "bf16", "fp16"])
    rounded = DalleTokenizer(path=str(dalle_file), precision="bf16")
    changed = (rounded.encode(photos) != tokenizer.encode(photos)).sum().item()
    assert differences["bf16"] == pytest.approx(changed / (12 * 64))
    assert differences["fp32"] == 0 < differences["fp16"] < differences["bf16"] < 0.1


def test_fp16_on_a_cpu_that_lacks_it_is_said_to_be_slow(
    dalle_file: Path, photos: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert [is_slow(precision, CPU) for precision in ("fp32", "bf16", "fp16")] == [0, 0, 1]
    assert not is_slow("fp16", torch.device("cuda"))
    tokenizer = DalleTokenizer(path=str(dalle_file), precision="fp16")
    with pytest.warns(UserWarning, match=r"set tokenizer\.precision=fp32 or bf16"):
        tokenizer.encode(photos[:1])


def test_tf32_is_off_while_it_computes_and_as_before_afterwards(
    dalle_file: Path, photos: Tensor
) -> None:
    tokenizer = DalleTokenizer(path=str(dalle_file))
    seen: list[bool] = []
    tokenizer.encoder.blocks.input.register_forward_hook(
        lambda *_: seen.append(torch.backends.cudnn.allow_tf32)
    )
    before = torch.backends.cudnn.allow_tf32
    with torch.backends.cudnn.flags(allow_tf32=True):
        tokenizer.encode(photos[:1])
        assert torch.backends.cudnn.allow_tf32
    assert seen == [False]
    assert torch.backends.cudnn.allow_tf32 == before


def test_the_fingerprint_is_that_of_weights_and_precision(
    dalle_file: Path, decoder_file: Path, dalle_encoder: nn.Module, tmp_path: Path
) -> None:
    fingerprint = DalleTokenizer(path=str(dalle_file)).fingerprint
    assert len(fingerprint) == 64
    convert_dalle(dalle_file, tmp_path / "same.safetensors")
    torch.save(dalle_encoder.state_dict(), tmp_path / "same.pth")
    for name in ("same.safetensors", "same.pth"):
        assert DalleTokenizer(path=str(tmp_path / name)).fingerprint == fingerprint
    with_pictures = DalleTokenizer(path=str(dalle_file), decoder=str(decoder_file))
    assert with_pictures.fingerprint == fingerprint  # the decoder decides no token
    weights = {name: weight.clone() for name, weight in dalle_encoder.state_dict().items()}
    weights["blocks.output.conv.b"][0] += 1e-3
    torch.save(weights, tmp_path / "other.pth")
    others = [
        DalleTokenizer(path=str(tmp_path / "other.pth")),
        DalleTokenizer(path=str(dalle_file), precision="bf16"),
        DalleTokenizer(path=str(dalle_file), precision="fp16"),
    ]
    assert len({fingerprint, *(other.fingerprint for other in others)}) == 4


def test_halves_that_are_swapped_are_named(dalle_file: Path, decoder_file: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.path=.*holds DALL-E's decoder"):
        DalleTokenizer(path=str(decoder_file))
    with pytest.raises(UserError, match=r"tokenizer\.decoder=.*holds DALL-E's encoder"):
        DalleTokenizer(path=str(dalle_file), decoder=str(dalle_file))


def test_halves_of_two_dvaes_are_refused(dalle_file: Path, tmp_path: Path) -> None:
    torch.save(Decoder(n_hid=16, n_blk_per_group=1, vocab_size=32), tmp_path / "other.pkl")
    with pytest.raises(UserError, match=r"draws 32 words, but the encoder .* knows 64"):
        DalleTokenizer(path=str(dalle_file), decoder=str(tmp_path / "other.pkl"))


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_settings_are_checked_and_home_is_found(dalle_file: Path, home: Path) -> None:
    (home / "encoder.pkl").write_bytes(dalle_file.read_bytes())
    part = make_part(TOKENIZERS, PartConfig(name="dalle", path="~/encoder.pkl", precision="bf16"))
    assert isinstance(part, DalleTokenizer) and part.precision == "bf16"
    with pytest.raises(UserError, match=r"tokenizer\.precision: .*'fp32', 'bf16' or 'fp16'"):
        make_part(TOKENIZERS, PartConfig(name="dalle", path="~/encoder.pkl", precision="fp8"))
