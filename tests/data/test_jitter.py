"""The jitter is Pillow's ImageEnhance to the last bit, with the compiled kernels and without."""

import sys
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from mimkit.data._kernels import Kernels, _compile, load_kernels
from mimkit.data.jitter import JITTERS, jitter_crop
from mimkit.data.views import Box

ENHANCERS = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "saturation": ImageEnhance.Color,
}
ORDERS = list(permutations(JITTERS))
Jitter = list[tuple[str, float]]


def plainly(pixels: np.ndarray, jitter: Jitter, box: Box, flip: bool) -> np.ndarray:
    """Pillow on the whole image, then the box, then its mirror image."""
    image = Image.fromarray(pixels)
    for name, factor in jitter:
        image = ENHANCERS[name](image).enhance(factor)
    top, left, height, width = box
    crop = np.asarray(image)[top : top + height, left : left + width]
    return crop[:, ::-1] if flip else crop


def images() -> list[np.ndarray]:
    """Noise, dark, bright, grey and flat ones, of sizes that fill no vector register evenly."""
    rng = np.random.default_rng(0)
    sizes = [(1, 1), (1, 7), (9, 1), (3, 2), (17, 33), (40, 64), (31, 65), (5, 257)]
    noise = [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
    grey = [np.repeat(image[..., :1], 3, axis=2) for image in noise[3:6]]
    flat = [np.full((6, 10, 3), level, np.uint8) for level in (0, 1, 127, 128, 255)]
    return [*noise, *grey, *flat, noise[5] // 16, 255 - noise[5] // 16]


def draw_box(height: int, width: int, rng: np.random.Generator) -> Box:
    top, left = int(rng.integers(height)), int(rng.integers(width))
    return top, left, int(rng.integers(1, height - top + 1)), int(rng.integers(1, width - left + 1))


@pytest.fixture(scope="module", params=["compiled", "Pillow"])
def kernels(request: pytest.FixtureRequest) -> Kernels | None:
    if request.param == "Pillow":
        return None
    pytest.importorskip("numba")
    return load_kernels()


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_every_order_is_exact(order: tuple[str, ...], kernels: Kernels | None) -> None:
    rng = np.random.default_rng(ORDERS.index(order))
    for pixels in images():
        for flip in (False, True):
            jitter = [(name, float(rng.uniform(0.6, 1.4))) for name in order]
            box = draw_box(*pixels.shape[:2], rng)
            found = jitter_crop(pixels, jitter, box, flip=flip, kernels=kernels)
            np.testing.assert_array_equal(found, plainly(pixels, jitter, box, flip))


@pytest.mark.parametrize("factor", [0.0, 1e-3, 0.5, 0.999, 1.0, 1.001, 1.5, 1.999])
def test_factors_at_their_ends_are_exact(factor: float, kernels: Kernels | None) -> None:
    """A jitter below 1 draws from 0 to 2; at 0 and 1 Pillow copies instead of blending."""
    pixels = np.random.default_rng(1).integers(0, 256, (23, 47, 3), np.uint8)
    for order in ORDERS:
        for name in JITTERS:
            jitter = [(other, factor if other == name else 0.8) for other in order]
            found = jitter_crop(pixels, jitter, (0, 0, 23, 47), flip=False, kernels=kernels)
            np.testing.assert_array_equal(found, plainly(pixels, jitter, (0, 0, 23, 47), False))


def test_every_level_is_exact_for_many_factors(kernels: Kernels | None) -> None:
    ramp = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)
    rng = np.random.default_rng(2)
    for _ in range(300):
        jitter = [(name, float(rng.uniform(0, 2))) for name in rng.permutation(JITTERS)]
        found = jitter_crop(ramp, jitter, (0, 0, 1, 256), flip=False, kernels=kernels)
        np.testing.assert_array_equal(found, plainly(ramp, jitter, (0, 0, 1, 256), False))


@pytest.mark.parametrize("levels", [(10, 11), (10, 10, 11), (10, 11, 11), (0, 255)])
def test_the_mean_grey_is_rounded_as_pillow_does(
    levels: tuple[int, ...], kernels: Kernels | None
) -> None:
    """10.5 becomes 11: at a factor of 0 contrast shows nothing but the mean."""
    pixels = np.repeat(np.array(levels, np.uint8)[None, :, None], 3, axis=2)
    jitter = [("contrast", 0.0), ("brightness", 1.0), ("saturation", 1.0)]
    found = jitter_crop(pixels, jitter, (0, 0, 1, 1), flip=False, kernels=kernels)
    assert found.tolist() == [[[int(np.mean(levels) + 0.5)] * 3]]


@pytest.mark.parametrize("length", [0, 1, 2])
def test_a_part_of_the_operations_is_exact_too(length: int, kernels: Kernels | None) -> None:
    pixels = images()[5]
    for order in permutations(JITTERS, length):
        jitter = [(name, 1.3) for name in order]
        found = jitter_crop(pixels, jitter, (3, 5, 20, 30), flip=True, kernels=kernels)
        np.testing.assert_array_equal(found, plainly(pixels, jitter, (3, 5, 20, 30), True))


def test_pixels_may_be_read_only_and_strided(kernels: Kernels | None) -> None:
    rng = np.random.default_rng(3)
    pixels = rng.integers(0, 256, (20, 60, 3), np.uint8)
    pixels.flags.writeable = False
    jitter = [("saturation", 0.7), ("brightness", 1.2), ("contrast", 1.1)]
    for image in (pixels, pixels[::2, ::-2]):
        found = jitter_crop(image, jitter, (0, 0, *image.shape[:2]), flip=False, kernels=kernels)
        expected = plainly(np.ascontiguousarray(image), jitter, (0, 0, *image.shape[:2]), False)
        np.testing.assert_array_equal(found, expected)
        assert found.flags.writeable and found.flags.c_contiguous


def test_without_numba_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)  # as if it were not installed
    assert load_kernels.__wrapped__() is None


def test_a_numba_that_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.3 or less')")
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match="cannot be imported .Numba needs NumPy 2.3 or less"):
        assert load_kernels.__wrapped__() is None


@pytest.mark.parametrize("error", [RuntimeError("no locator available"), OSError(28, "full")])
def test_without_a_folder_for_its_cache_the_kernel_is_still_compiled(error: Exception) -> None:
    asked: list[dict[str, Any]] = []

    def njit(types: Any, **options: Any) -> Any:
        asked.append(options)
        if options.get("cache"):
            raise error
        return lambda function: function

    assert _compile(njit, abs, ()) is abs
    assert [options.get("cache", False) for options in asked] == [True, False]
    assert asked[0]["fastmath"] == asked[1]["fastmath"] == {"nnan", "ninf", "nsz"}
