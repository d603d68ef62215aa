"""Images come out as Pillow shows them, or are refused with a reason."""

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from mimkit.data.decode import DecodeError, decode_image, image_format

# Pillow decodes these and we do not: their data are damaged.
STRICTER = {
    "pillow_hopper_bad_exif.jpg": "extraneous bytes",  # in mid-scan, not only in its EXIF
    "pillow_truncated_app14.jpg": "extraneous bytes",
    "pillow_broken_data_stream.png": "checksum",
}
NOT_READ = {"GIF": "is a GIF", "TIFF": "is a TIFF"}


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def reference(encoded: bytes) -> np.ndarray:
    image = Image.open(io.BytesIO(encoded))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(image.convert("RGB"))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of damaged EXIF
def test_odd_images_against_their_manifest(odd_images: Path) -> None:
    with (odd_images / "manifest.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 30
    for row in rows:
        name, encoded = row["file"], (odd_images / row["file"]).read_bytes()
        refusal = STRICTER.get(name) or NOT_READ.get(row["format"])
        if row["pillow_result"] != "ok" or refusal:
            with pytest.raises(DecodeError, match=refusal):
                decode_image(encoded)
        elif row["mode"] != "I;16":
            pixels = decode_image(encoded)
            assert pixels.flags.c_contiguous, name
            few = slice(None, None, 1 + len(pixels) // 1000)  # one has 54 million pixels
            assert np.array_equal(pixels[few], reference(encoded)[few]), name


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_orientation(odd_images: Path) -> None:
    with (odd_images / "manifest.csv").open(newline="") as file:
        names = [row["file"] for row in csv.DictReader(file) if row["exif_orientation"].isdigit()]
    names = [name for name in names if name not in STRICTER]
    assert len(names) > 8
    for name in names:
        encoded = (odd_images / name).read_bytes()
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded)))
        if image.mode == "RGB":
            honoured = decode_image(encoded, exif="honour")
            np.testing.assert_array_equal(honoured, np.asarray(image), name)
            np.testing.assert_array_equal(decode_image(encoded), reference(encoded), name)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation(photograph: np.ndarray, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = encode(Image.fromarray(photograph[:40, :60]), "PNG", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded)))
    np.testing.assert_array_equal(decode_image(encoded, exif="honour"), np.asarray(expected))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg_equals_pillow(photograph: np.ndarray, mode: str) -> None:
    encoded = encode(Image.fromarray(photograph).convert(mode), "JPEG")
    np.testing.assert_array_equal(decode_image(encoded), reference(encoded))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_png_equals_pillow(photograph: np.ndarray, mode: str) -> None:
    image = Image.fromarray(photograph[:50, :70]).convert(mode)
    if mode in ("LA", "RGBA"):
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    options = {"transparency": 3} if mode == "P" else {}
    encoded = encode(image, "PNG", **options)
    np.testing.assert_array_equal(decode_image(encoded), reference(encoded))


def test_sixteen_bits_are_scaled_and_not_clipped() -> None:
    grey = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    pixels = decode_image(encode(Image.fromarray(grey), "PNG"))
    np.testing.assert_array_equal(pixels[..., 0], np.round(grey / 257).astype(np.uint8))
    assert (pixels == pixels[..., :1]).all()


@pytest.mark.parametrize("lossless", [True, False])
def test_webp_equals_pillow(photograph: np.ndarray, lossless: bool) -> None:
    encoded = encode(Image.fromarray(photograph), "WEBP", lossless=lossless)
    np.testing.assert_array_equal(decode_image(encoded), reference(encoded))


@settings(deadline=None, max_examples=60)
@given(data=st.data(), kind=st.sampled_from(["JPEG", "PNG", "WEBP"]))
def test_what_is_cut_is_refused(data: st.DataObject, kind: str) -> None:
    gradient = Image.radial_gradient("L").resize((90, 60)).convert("RGB")
    encoded = encode(gradient, kind)
    cut = data.draw(st.integers(0, len(encoded) - 13))  # a PNG's last chunk says only "end"
    with pytest.raises(DecodeError):
        decode_image(encoded[:cut])


@settings(deadline=None, max_examples=200)
@given(data=st.data(), kind=st.sampled_from(["JPEG", "PNG", "WEBP"]))
def test_damage_never_raises_anything_else(data: st.DataObject, kind: str) -> None:
    encoded = bytearray(encode(Image.linear_gradient("L").resize((40, 30)), kind))
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        pixels = decode_image(bytes(encoded), exif="honour", max_pixels=10**6)
    except DecodeError as error:
        assert str(error)
    else:
        assert pixels.dtype == np.uint8 and pixels.ndim == 3


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_damage_in_mid_scan_is_refused(photograph: np.ndarray, kind: str) -> None:
    encoded = bytearray(encode(Image.fromarray(photograph), kind))
    middle = len(encoded) // 2
    encoded[middle : middle + 4096] = np.random.default_rng(0).bytes(4096)
    with pytest.raises(DecodeError):
        decode_image(bytes(encoded))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_size_is_checked_before_decoding(kind: str) -> None:
    encoded = encode(Image.new("RGB", (300, 200)), kind)
    assert decode_image(encoded, max_pixels=60_000).shape == (200, 300, 3)
    with pytest.raises(DecodeError, match="300 x 200 = 60000 pixels"):
        decode_image(encoded, max_pixels=59_999)


def test_a_decompression_bomb_is_refused() -> None:
    bomb = bytearray(encode(Image.new("L", (20_000, 1)), "PNG"))
    with pytest.raises(DecodeError, match="pixels"):
        decode_image(bytes(bomb), max_pixels=10_000)


def test_content_decides(photograph: np.ndarray) -> None:
    assert image_format(encode(Image.fromarray(photograph), "PNG")) == "png"
    for encoded, cause in [(b"", "0 bytes"), (b"%!PS-Adobe", "only JPEG"), (b"GIF89a", "GIF")]:
        with pytest.raises(DecodeError, match=cause):
            image_format(encoded)
