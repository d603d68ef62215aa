"""The views are BEiT's: compared with Pillow and torchvision, given the same draws."""

import io

import numpy as np
import pytest
import torch
from photographs import PHOTOGRAPHS, as_jpeg
from PIL import Image
from torchvision.transforms import functional as tv

from mimkit.data._kernels import load_kernels
from mimkit.data.decode import decode_image
from mimkit.data.resize import _pillow_lanczos, resize
from mimkit.data.views import CenterView, Drawing, TwoViews
from mimkit.random import Purpose, Rng, generator

VIEWS = TwoViews(image_size=224, token_size=112)
NAMES = ["astronaut.png", "chelsea.png", "coffee.png", "camera.png", "rocket.jpg", "ihc.png"]
ADJUST = {
    "brightness": tv.adjust_brightness,
    "contrast": tv.adjust_contrast,
    "saturation": tv.adjust_saturation,
}


def rng(sample: int) -> Rng:
    return generator(Purpose.VIEW, seed=0, sample=sample)


def beit(pixels: np.ndarray, drawing: Drawing) -> Image.Image:
    """The crop, by Pillow on the whole image, in BEiT's order."""
    image = Image.fromarray(pixels)
    for name, factor in drawing.jitter:
        image = ADJUST[name](image, factor)
    if drawing.flip:
        image = tv.hflip(image)
    top, left, height, width = drawing.box
    return image.crop((left, top, left + width, top + height))


def resized(crop: Image.Image, size: int, filter: Image.Resampling) -> np.ndarray:
    """By Pillow up to 12: first across, then down. Pillow 13 may turn that round."""
    image = crop.resize((size, crop.height), filter) if crop.width != size else crop
    image = image.resize((size, size), filter) if crop.height != size else image
    return np.asarray(image).astype(int)


@pytest.fixture(scope="module", params=NAMES)
def pixels(request: pytest.FixtureRequest) -> np.ndarray:
    return np.array(Image.open(PHOTOGRAPHS / request.param).convert("RGB"))


def test_views_are_beits(pixels: np.ndarray) -> None:
    for sample in range(12):
        drawing = VIEWS.draw(*pixels.shape[:2], rng(100 + sample))
        views, crop = VIEWS.render(pixels, drawing, load_kernels()), beit(pixels, drawing)
        for view, size, filter in [
            (views.patch_view_CHW, 224, Image.Resampling.BICUBIC),
            (views.token_view_Chw, 112, Image.Resampling.LANCZOS),
        ]:
            assert view.shape == (3, size, size) and view.dtype == torch.uint8
            assert view.is_contiguous()
            apart = np.abs(view.permute(1, 2, 0).numpy() - resized(crop, size, filter))
            assert apart.max() <= 2
            assert apart.mean() < 0.01


def test_compiled_kernels_change_no_pixel(pixels: np.ndarray) -> None:
    pytest.importorskip("numba")
    for sample in range(12):
        drawing = VIEWS.draw(*pixels.shape[:2], rng(200 + sample))
        compiled, plain = (VIEWS.render(pixels, drawing, k) for k in (load_kernels(), None))
        assert torch.equal(compiled.patch_view_CHW, plain.patch_view_CHW)
        assert torch.equal(compiled.token_view_Chw, plain.token_view_Chw)


@pytest.mark.parametrize("size", [(7, 300), (300, 7), (60, 61), (16, 16)])
def test_the_stand_in_for_torchs_lanczos(pixels: np.ndarray, size: tuple[int, int]) -> None:
    """For torch < 2.14. Where torch has it, both agree."""
    crop = pixels[: size[0], : size[1]]
    found = _pillow_lanczos(crop, 16)
    expected = resized(Image.fromarray(crop), 16, Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(found, expected)
    ours = resize(crop, 16, "lanczos").permute(1, 2, 0).numpy().astype(int)
    assert np.abs(ours - expected).max() <= 2


def test_draws_are_numpys_uniform() -> None:
    """The draws of a version of mimkit are those of the next: written out, and compared."""
    for sample in range(50):
        drawing, again = VIEWS.draw(300, 400, rng(sample)), rng(sample)
        order = again.permutation(3)
        factors = again.uniform(0.6, 1.4, 3)
        names = ("brightness", "contrast", "saturation")
        assert drawing.jitter == tuple((names[i], float(factors[i])) for i in order)
        assert drawing.flip == (again.random() < 0.5)
        area = 120_000 * again.uniform(0.08, 1.0)
        ratio = np.exp(again.uniform(np.log(3 / 4), np.log(4 / 3)))
        height, width = round(np.sqrt(area / ratio)), round(np.sqrt(area * ratio))
        if height <= 300 and width <= 400:  # else it was drawn again
            top, left = again.integers(301 - height), again.integers(401 - width)
            assert drawing.box == (top, left, height, width)


def test_draws_have_torchvisions_ranges() -> None:
    drawings = [VIEWS.draw(300, 400, rng(sample)) for sample in range(2000)]
    assert len({tuple(name for name, _ in d.jitter) for d in drawings}) == 6
    factors = np.array([factor for d in drawings for _, factor in d.jitter])
    assert 0.6 <= factors.min() < 0.61 and 1.39 < factors.max() <= 1.4
    assert 0.46 < np.mean([d.flip for d in drawings]) < 0.54
    boxes = np.array([d.box for d in drawings])
    area, ratio = boxes[:, 2] * boxes[:, 3] / 120_000, boxes[:, 3] / boxes[:, 2]
    assert 0.078 < area.min() < 0.09 and 0.9 < area.max() <= 1
    assert 0.74 < ratio.min() < 0.77 and 1.3 < ratio.max() < 1.35
    assert (boxes[:, :2] >= 0).all() and (boxes[:, :2] + boxes[:, 2:] <= [300, 400]).all()


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 500), (500, 1), (3, 2)])
def test_tiny_and_narrow_images(height: int, width: int) -> None:
    pixels = np.full((height, width, 3), 77, np.uint8)
    for sample in range(20):
        drawing = VIEWS.draw(height, width, rng(sample))
        top, left, h, w = drawing.box
        assert h >= 1 and w >= 1 and top + h <= height and left + w <= width
        views = VIEWS.render(pixels, drawing, load_kernels())
        assert views.patch_view_CHW.shape == (3, 224, 224)


def test_equal_keys_give_equal_views(photograph: np.ndarray) -> None:
    encoded = as_jpeg(photograph)
    one, same, other = (VIEWS(encoded, rng(sample)) for sample in (1, 1, 2))
    assert torch.equal(one.patch_view_CHW, same.patch_view_CHW)
    assert torch.equal(one.token_view_Chw, same.token_view_Chw)
    assert not torch.equal(one.patch_view_CHW, other.patch_view_CHW)


def test_without_jitter_and_flip(photograph: np.ndarray) -> None:
    plain = TwoViews(image_size=32, token_size=16, jitter=0, flip=0, crop_scale=(1, 1))
    drawing = plain.draw(*photograph.shape[:2], rng(0))
    assert drawing.jitter == () and not drawing.flip


def test_center_view(photograph: np.ndarray) -> None:
    encoded = as_jpeg(photograph)
    views = CenterView(image_size=64, token_size=32)(encoded)
    side = min(photograph.shape[:2])
    box = ((300 - side) // 2, (451 - side) // 2, side, side)
    crop = Image.fromarray(decode_image(encoded)).crop((box[1], box[0], box[1] + side, side))
    expected = resized(crop, 64, Image.Resampling.BICUBIC)
    assert np.abs(views.patch_view_CHW.permute(1, 2, 0).numpy() - expected).max() <= 3
    assert views.token_view_Chw.shape == (3, 32, 32)
    assert CenterView(image_size=64)(encoded).token_view_Chw.shape == (3, 0, 0)


def test_exif_is_a_setting(photograph: np.ndarray) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    buffer = io.BytesIO()
    Image.fromarray(photograph).save(buffer, "JPEG", exif=exif)
    ignored = CenterView(image_size=300)(buffer.getvalue()).patch_view_CHW
    turned = CenterView(image_size=300, exif="honour")(buffer.getvalue()).patch_view_CHW
    assert (ignored.flip(1, 2).float() - turned.float()).abs().mean() < 8
    assert not torch.equal(ignored, turned)
