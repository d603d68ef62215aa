"""Real photographs for the tokenizer's tests: crops out of scikit-image's wheel."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from dall_e import Decoder, Encoder
from PIL import Image
from teachers import export_encoder
from torch import Tensor, nn

from mimkit.random import Purpose, torch_generator
from mimkit.tokenizers._dvae_model import Dvae, make_dvae
from mimkit.tokenizers._network_file import drawn_from
from mimkit.tokenizers._vqkd_file import VqkdSettings, save_vqkd
from mimkit.tokenizers._vqkd_model import Vqkd

PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")


def crops(*, num: int, size: int, seed: int) -> Tensor:
    """`num` random crops of the photographs, half size, as float32 in [0, 1]; NChw."""
    spec = importlib.util.find_spec("skimage")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "data"
    rng = np.random.default_rng(seed)
    images = [Image.open(folder / name).convert("RGB") for name in PHOTOS]
    cut = []
    for number in range(num):
        image = images[number % len(images)]
        left = int(rng.integers(0, image.width - 2 * size + 1))
        top = int(rng.integers(0, image.height - 2 * size + 1))
        box = (left, top, left + 2 * size, top + 2 * size)
        cut.append(np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, box=box)))
    return torch.from_numpy(np.stack(cut)).permute(0, 3, 1, 2).contiguous().float() / 255


@pytest.fixture(scope="session")
def photos() -> Tensor:
    return crops(num=12, size=64, seed=0)


@pytest.fixture(scope="session")
def training_crops() -> Tensor:
    return crops(num=256, size=32, seed=1)


@pytest.fixture(scope="session")
def varied_dvae(photos: Tensor) -> Dvae:
    """Untrained, 64 words. Fresh weights give one word nearly everywhere, so logits are centred."""
    generator = torch_generator(Purpose.INIT, seed=0)
    dvae = make_dvae(width=16, blocks=1, vocabulary=64, generator=generator)
    with torch.no_grad():
        output = dvae.encoder.blocks.output.conv
        output.b.sub_(dvae.logits(photos).mean((0, 2, 3)))
        assert len(dvae.logits(photos).argmax(1).unique()) > 20
    return dvae


@pytest.fixture(scope="session")
def dvae_file(tokenizer_file: Path) -> Path:
    return tokenizer_file


@pytest.fixture(scope="session")
def features_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of `mimkit export`: width 32, two blocks, 4 x 4 patches of 8 pixels."""
    return export_encoder(tmp_path_factory.mktemp("teacher") / "teacher.safetensors")


@pytest.fixture(scope="session")
def vqkd_file(tmp_path_factory: pytest.TempPathFactory, training_crops: Tensor) -> Path:
    """Untrained, 64 codes that lie where tokens are, 4 x 4 patches of 8 pixels."""
    path = tmp_path_factory.mktemp("vqkd") / "vqkd.safetensors"
    settings = VqkdSettings(width=48, heads=3, depth=1, patch_size=8, image_size=32,
                            vocabulary=64, code_dim=8)  # fmt: skip
    with drawn_from(0):
        vqkd = Vqkd(**settings.sizes)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        token_MC = vqkd.directions(training_crops[:64]).flatten(0, 1)
        vqkd.codebook_VC.copy_(token_MC[torch.randperm(len(token_MC), generator=draw)[:64]])
    save_vqkd(path, vqkd, settings)
    return path


@pytest.fixture(scope="session")
def dalle_encoder(varied_dvae: Dvae) -> nn.Module:
    """A module of dall_e's own, 64 words, as OpenAI pickled one with 8192."""
    encoder = Encoder(n_hid=16, n_blk_per_group=1, vocab_size=64)
    encoder.load_state_dict(varied_dvae.encoder.state_dict())
    return encoder


@pytest.fixture(scope="session")
def dalle_decoder(varied_dvae: Dvae) -> nn.Module:
    decoder = Decoder(n_hid=16, n_blk_per_group=1, vocab_size=64)
    decoder.load_state_dict(varied_dvae.decoder.state_dict())
    return decoder


@pytest.fixture(scope="session")
def dalle_file(tmp_path_factory: pytest.TempPathFactory, dalle_encoder: nn.Module) -> Path:
    path = tmp_path_factory.mktemp("dalle") / "encoder.pkl"
    torch.save(dalle_encoder, path)
    return path
