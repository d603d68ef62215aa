"""Features equal the encoder's own tokens; ranks share the work; what lies on disk is checked."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from mimkit.batch import Batch, normalise
from mimkit.downstream.feature_cache import cached
from mimkit.downstream.features import (
    Allocate,
    Extracted,
    Features,
    encoder_features,
    extract,
    pixel_features,
    summed,
)
from mimkit.errors import UserError
from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.init import initialise
from mimkit.models.stems import STEMS

PIXELS = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}


def make_encoder(*, depth: int = 3) -> ImageEncoder:
    """32 pixels, 4 x 4 patches, width 24."""
    stem = STEMS["linear"](width=24, patch_size=8)
    model = ImageEncoder(stem, Encoder(width=24, heads=3, depth=depth, grid=(4, 4)))
    initialise(model, seed=0)
    return model.eval()


def make_batches(num: int, *, size: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
    """What `eval_loader` gives a rank of `num` images with labels 0..3."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (num, 3, 32, 32), dtype=torch.uint8, generator=draw)
    for k in range(math.ceil(num / (world * size))):
        first = (k * world + rank) * size
        place = torch.arange(first, first + size)
        index_B = torch.where(place < num, place + 100, -1)
        shown = images[place % num]
        yield Batch(shown, shown, torch.empty(size, 0, dtype=torch.bool), place % 4, index_B)


def _extractor(encoder: ImageEncoder) -> Callable[[Batch], dict[str, Tensor]]:
    found = encoder_features(encoder, layers=[1, 2, 3], token_layers=[2, 3],
                             device=torch.device("cpu"), **PIXELS)  # fmt: skip
    return lambda batch: {**found(batch), **pixel_features(batch)}


def test_features_are_the_encoders_tokens() -> None:
    encoder = make_encoder()
    found = extract(_extractor(encoder), make_batches(10, size=4), num_images=10)
    images = torch.cat([batch.patch_view_BCHW for batch in make_batches(10, size=4)])[:10]
    with torch.no_grad():
        image_BCHW = normalise(images, **PIXELS)
        last_BND, second_BND = encoder(image_BCHW), encoder.intermediates(image_BCHW, [2])[0]
    features = Features(found.arrays["pooled"], (1, 2, 3), found.label_B, found.index_B,
                        found.arrays["tokens"], (2, 3))  # fmt: skip
    torch.testing.assert_close(features.of(3, "mean"), last_BND[:, 1:].mean(1))
    torch.testing.assert_close(features.of(2, "cls"), second_BND[:, 0])
    both = torch.cat([last_BND[:, 1:].mean(1), last_BND[:, 0]], 1)
    torch.testing.assert_close(features.of(3, "cls+mean"), both)
    assert features.tokens_BLND is not None and features.tokens_BLND.dtype == np.float16
    np.testing.assert_allclose(features.tokens_BLND[:, 1], last_BND[:, 1:], rtol=1e-3, atol=1e-3)
    assert found.label_B.tolist() == [n % 4 for n in range(10)]
    assert found.index_B.tolist() == [100 + n for n in range(10)]
    pixels = found.arrays["pixels"]
    assert pixels.shape == (10, 1, 1, 3 * 32 * 32)
    np.testing.assert_allclose(pixels[0].mean(), images[0].float().mean() / 255, rtol=1e-5)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_work(world: int) -> None:
    look = _extractor(make_encoder())
    whole = extract(look, make_batches(10, size=4), num_images=10)
    parts = [extract(look, make_batches(10, size=4, rank=rank, world=world), num_images=10,
                     rank=rank, world=world) for rank in range(world)]  # fmt: skip
    for name, array in whole.arrays.items():
        assert np.array_equal(sum(part.arrays[name] for part in parts), array), name
    doubled = summed(parts[0], lambda tensor: tensor * 2)
    assert torch.equal(doubled.label_B, parts[0].label_B * 2)
    assert torch.equal(sum(part.index_B for part in parts), whole.index_B)  # type: ignore[arg-type]


def test_a_damaged_encoder_is_said_to_be() -> None:
    encoder = make_encoder()
    encoder.encoder.cls_token.data.fill_(torch.nan)
    with pytest.raises(UserError, match=r"pooled.* not finite"):
        extract(_extractor(encoder), make_batches(4, size=4), num_images=4)


class _Kept:
    """A cache in a folder, and how often features were made for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made, self.said = folder, 0, list[str]()

    def get(self, **facts: object) -> Extracted:
        def make(allocate: Allocate) -> Extracted:
            self.made += 1
            return extract(_extractor(make_encoder()), make_batches(10, size=4), num_images=10,
                           allocate=allocate)  # fmt: skip

        return cached(self.folder, facts, make, say=self.said.append)


def test_features_are_made_once(tmp_path: Path) -> None:
    kept = _Kept(tmp_path / "features")
    first, again = kept.get(encoder="a", view=32), kept.get(view=32, encoder="a")
    assert kept.made == 1 and "kept in" in kept.said[0] and "found in" in kept.said[1]
    expected = extract(_extractor(make_encoder()), make_batches(10, size=4), num_images=10)
    for found in (first, again):
        assert set(found.arrays) == {"pooled", "tokens", "pixels"}
        for name, array in expected.arrays.items():
            assert np.array_equal(found.arrays[name], array)
        assert torch.equal(found.label_B, expected.label_B)
    kept.get(encoder="b", view=32)
    kept.get(encoder="a", view=48)
    assert kept.made == 3


def test_damaged_features_are_made_again(tmp_path: Path) -> None:
    kept = _Kept(tmp_path)
    kept.get(encoder="a")
    [folder] = tmp_path.iterdir()
    data = bytearray((folder / "pooled.npy").read_bytes())
    data[-5] ^= 1
    (folder / "pooled.npy").write_bytes(data)
    found = kept.get(encoder="a")
    assert kept.made == 2 and "damaged (pooled.npy has changed); made again" in kept.said[1]
    assert np.isfinite(found.arrays["pooled"]).all()
    (folder / "facts.json").write_text("{")
    kept.get(encoder="a")
    assert kept.made == 3


def test_a_full_disk_is_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=9000))
    with pytest.raises(UserError, match=r"has 0\.0 GiB left; give fewer --layers"):
        _Kept(tmp_path / "new").get(encoder="a")
    assert not list((tmp_path / "new").iterdir())
