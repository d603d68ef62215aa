"""BEiT's own two views, written plainly: Pillow on the whole image, float32 out.

After microsoft/unilm, beit/datasets.py (DataAugmentationForBEiT) and beit/transforms.py: colour
jitter, flip, one box resized twice, ToTensor, and Normalize for the encoder's view. The draws are
given, so that both pipelines can be compared pixel by pixel.
"""

import io

from PIL import Image, ImageEnhance
from torch import Tensor
from torchvision.transforms import functional as tv

from mimkit.data.views import Drawing, TwoViews
from mimkit.random import Rng

_ENHANCERS = {
    "brightness": ImageEnhance.Brightness,
    "contrast": ImageEnhance.Contrast,
    "saturation": ImageEnhance.Color,
}
_FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
_HALF = (0.5, 0.5, 0.5)


def beit_views(encoded: bytes, views: TwoViews, rng: Rng) -> tuple[Tensor, Tensor]:
    """The encoder's view, normalised, and the tokenizer's in [0, 1], as `views` would draw them."""
    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    crop = beit_crop(image, views.draw(image.height, image.width, rng))
    image_size, token_size = _sizes(views)
    patch_view = crop.resize((image_size, image_size), _FILTERS[views.image_interpolation])
    token_view = crop.resize((token_size, token_size), _FILTERS[views.token_interpolation])
    return tv.normalize(tv.to_tensor(patch_view), _HALF, _HALF), tv.to_tensor(token_view)


def beit_pixels(encoded: bytes, views: TwoViews, rng: Rng) -> tuple[Image.Image, Image.Image]:
    """The same views as pixels, resized in the order of passes that Pillow had up to 12.

    Pillow 13 passes down before across where that is less work, and rounds in between, which moves
    pixels by up to 20 levels. Two calls of its `resize`, across and then down, are 12's one call.
    """
    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    crop = beit_crop(image, views.draw(image.height, image.width, rng))
    image_size, token_size = _sizes(views)
    patch_view = _across_then_down(crop, image_size, _FILTERS[views.image_interpolation])
    token_view = _across_then_down(crop, token_size, _FILTERS[views.token_interpolation])
    return patch_view, token_view


def _sizes(views: TwoViews) -> tuple[int, int]:
    assert isinstance(views.image_size, int) and views.token_size is not None  # BEiT's are square
    return views.image_size, views.token_size


def beit_crop(image: Image.Image, drawing: Drawing) -> Image.Image:
    """What `drawing` describes, before it is resized."""
    for name, factor in drawing.jitter:
        image = _ENHANCERS[name](image).enhance(factor)
    if drawing.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    top, left, height, width = drawing.box
    return image.crop((left, top, left + width, top + height))


def _across_then_down(crop: Image.Image, size: int, filter: Image.Resampling) -> Image.Image:
    return crop.resize((size, crop.height), filter).resize((size, size), filter)
