"""`mimkit bench data`: BEiT's pipeline is BEiT's, ours has its pixels, and the numbers add up."""

import hashlib
import importlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import Shards
from PIL import Image

from mimkit.batch import Views
from mimkit.bench.beit import beit_pixels, beit_views
from mimkit.bench.data import MASK, VIEWS, measure, num_pieces
from mimkit.bench.data_stages import STAGES, time_stages, time_transfer
from mimkit.cli import _bench, main
from mimkit.cli._folder import sub_verbs
from mimkit.data._kernels import load_kernels
from mimkit.data.sources.shards import ShardSource
from mimkit.data.views import TwoViews
from mimkit.data.writer import Item, write_shard
from mimkit.errors import UserError
from mimkit.random import Purpose, Rng, generator

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
SAMPLE = Path(__file__).resolve().parents[3] / "shared" / "data" / "imagenet1k-sample"
WHOLE = TwoViews(image_size=24, token_size=12, jitter=0, flip=0, crop_scale=(1, 1),
                 crop_ratio=(40 / 300, 40 / 300))  # fmt: skip


def rng(sample: int = 0) -> Rng:
    return generator(Purpose.VIEW, seed=0, sample=sample)


@pytest.fixture
def narrow() -> bytes:
    """300 x 40 pixels, which Pillow 13 resizes down before across."""
    row, column = np.mgrid[:300, :40]
    planes = [row * row // 7 + 13 * column, row * column, 5 * row + column**2]
    buffer = io.BytesIO()
    Image.fromarray((np.stack(planes, 2) % 256).astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def test_the_reference_resizes_as_pillow_12_does(narrow: bytes) -> None:
    """The hashes are of Pillow 12.0.0's own `resize` of the whole image."""
    patch_view, token_view = beit_pixels(narrow, WHOLE, rng())
    hashes = [hashlib.sha256(np.asarray(v).tobytes()).hexdigest()[:16]
              for v in (patch_view, token_view)]  # fmt: skip
    assert hashes == ["53eabaf74c9bef20", "2c4eb6a7714b9949"]


def test_the_reference_gives_normalised_floats(narrow: bytes) -> None:
    views = TwoViews(image_size=24, token_size=12)
    patch_view, token_view = beit_views(narrow, views, rng(3))
    # The installed Pillow may pass down first: the same picture, some levels off at edges.
    pixels = [np.asarray(v, float).transpose(2, 0, 1) for v in beit_pixels(narrow, views, rng(3))]
    assert patch_view.shape == (3, 24, 24) and token_view.shape == (3, 12, 12)
    assert patch_view.dtype == token_view.dtype == torch.float32
    assert np.abs((patch_view.numpy() + 1) * 127.5 - pixels[0]).mean() < 1
    assert np.abs(token_view.numpy() * 255 - pixels[1]).mean() < 1


@pytest.mark.skipif(not SAMPLE.is_dir(), reason="the shared data sets are not here")
def test_our_pixels_are_beits_on_imagenet(tmp_path: Path) -> None:
    source = ShardSource(shards=str(SAMPLE), cache_dir=tmp_path)
    for index in range(0, 500, 25):
        encoded = source[index].image
        ours, its = VIEWS(encoded, rng(index)), beit_pixels(encoded, VIEWS, rng(index))
        for view, expected in zip(ours, its, strict=True):
            apart = np.abs(view.permute(1, 2, 0).numpy() - np.asarray(expected, int))
            assert apart.max() <= 2 and apart.mean() < 0.02  # of one image; 0.004 over all


def test_every_measurement_can_be_found_and_run() -> None:
    assert "data" in sub_verbs(_bench)
    for name in sub_verbs(_bench):
        module = importlib.import_module(f"mimkit.cli._bench.{name}")
        assert callable(module.add_parser) and callable(module.run)
        with pytest.raises(SystemExit, match="0"):
            main(["bench", name, "--help"])


def test_the_numbers_add_up(
    shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--shards", str(shards.train), "--images", "7", "--rounds", "1"]
    path = tmp_path / "new" / "data.json"
    assert main(["bench", "data", *words, "--gpu-rate", "500", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    report, ours = found["report"], found["images_per_second_per_core"]
    assert ours > 0 and found["data"] == str(shards.train) and report["images"] == 7
    assert found["ratio"] == pytest.approx(ours / found["reference_images_per_second_per_core"])
    assert found["decode_ceiling_share"] == pytest.approx(ours / report["speeds"]["decode"][0])
    assert found["max_level_difference"] <= 2 and found["mean_level_difference"] < 0.01
    assert report["stages"].keys() == {*STAGES, "transfer"}
    assert found["cores"] == {"500": pytest.approx(sum(report["stages"].values()) / 2)}
    assert report["megapixels"] == pytest.approx(48 * 48 / 1e6)
    assert report["has_kernels"] == (load_kernels() is not None)
    out = capsys.readouterr().out
    assert f"ratio: {found['ratio']:.2f} (" in out and str(shards.train) in out
    assert f"a GPU of 500 images/s needs {found['cores']['500']:.1f} cores" in out
    assert "SMALL" not in out


def test_the_embedded_set_is_named_as_small(
    shards: Shards, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mimkit.data.embedded.embedded_shards", lambda cache_dir: shards.train)
    assert main(["bench", "data", "--images", "2", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert "SMALL: these are not the numbers of ImageNet" in out
    assert "a GPU of 1,000 images/s" in out and "a GPU of 3,000 images/s" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--images", "0"], "--images is 0; expected more than 0"),
        (["--rounds", "-1"], "--rounds is -1; expected more than 0"),
        (["--gpu-rate", "nan"], "--gpu-rate is nan; expected more than 0"),
        (["--shards", "nowhere/*.tar"], "no shard found: looked for *.tar in nowhere"),
    ],
)
def test_bad_words_are_said(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "data", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_bad_image_is_named(tmp_path: Path, narrow: bytes) -> None:
    items = [Item("good", narrow, "png", 0), Item("bad", narrow[:100], "png", 0)]
    write_shard(tmp_path / "bad.tar", items, split="train")
    with pytest.raises(UserError, match=r"sample 1, key 'bad', in .*bad.tar at byte .* decoded"):
        measure(ShardSource(shards=str(tmp_path / "bad.tar")), images=5, rounds=1)


def test_speeds_of_different_pixels_are_not_compared(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inverted(encoded: bytes, views: TwoViews, rng: Rng) -> list[np.ndarray]:
        return [255 - np.asarray(view) for view in beit_pixels(encoded, views, rng)]

    monkeypatch.setattr("mimkit.bench.data.beit_pixels", inverted)
    with pytest.raises(UserError, match=r"grey levels .* expected at most 2, .* cannot be compar"):
        measure(ShardSource(shards=str(shards.train)), images=2, rounds=1)


def test_progress_has_an_end(shards: Shards) -> None:
    pieces: list[int] = []
    source = ShardSource(shards=str(shards.heldout))
    measure(source, images=1, rounds=2, done=lambda: pieces.append(1))
    assert len(pieces) == num_pieces(2)


def test_each_stage_gets_its_own_time(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that goes on by 1, 2, ... 7 seconds a reading, over and over."""
    readings = iter(np.cumsum([*range(1, 8)] * 3).tolist())
    monkeypatch.setattr("mimkit.bench.data_stages.cpu_seconds", lambda: next(readings))
    source = ShardSource(shards=str(shards.heldout))
    found = time_stages(source, VIEWS, MASK, load_kernels(), num=3)
    assert found == pytest.approx(dict(zip(STAGES, range(2000, 8000, 1000), strict=True)))


def test_transfer_costs_more_for_more_pixels(shards: Shards) -> None:
    source = ShardSource(shards=str(shards.heldout))
    small, large = (torch.zeros(3, side, side, dtype=torch.uint8) for side in (8, 224))
    times = [time_transfer(source, Views(view, view)) for view in (small, large)]
    assert 0 <= times[0] < times[1]
