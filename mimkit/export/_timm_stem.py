"""A stem inside timm's VisionTransformer, with mimkit and, as one file of source, without."""

import torch
from torch import Tensor, nn

from mimkit.export._standalone import standalone
from mimkit.models.stems import STEMS, Stem

_STEM_FILE = '''

def embed_layer(settings):
    """timm's `embed_layer` for the stem of a file: json.loads(metadata["stem"])["settings"]."""
    stem = {stem}(**settings)
    return lambda **arguments: StemEmbed(**arguments, stem=stem)
'''


class StemEmbed(nn.Module):
    """A stem where timm expects a patch embedding; the arguments are those timm gives it."""

    def __init__(
        self,
        img_size: int | tuple[int, int],
        patch_size: int,
        in_chans: int,
        embed_dim: int,
        bias: bool = True,
        dynamic_img_pad: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        stem: Stem,
    ) -> None:
        super().__init__()
        assert (in_chans, embed_dim, patch_size) == (3, stem.width, stem.patch_size)
        assert bias and not dynamic_img_pad
        self.stem = stem.to(device=device, dtype=dtype)
        self.patch_size = (patch_size, patch_size)
        self.set_input_size(img_size)

    def set_input_size(
        self, img_size: int | tuple[int, int], patch_size: tuple[int, int] | None = None
    ) -> None:
        """timm's: for images of another size. The patch is the stem's."""
        assert patch_size in (None, self.patch_size)
        height, width = img_size if isinstance(img_size, tuple | list) else (img_size, img_size)
        self.img_size = (height, width)
        self.grid_size = self.stem.grid(height, width)
        self.num_patches = self.grid_size[0] * self.grid_size[1]

    def feat_ratio(self, as_scalar: bool = True) -> int | tuple[int, int]:
        return self.patch_size[0] if as_scalar else self.patch_size

    def forward(self, image_BCHW: Tensor) -> Tensor:
        height, width = image_BCHW.shape[-2:]
        if (height, width) != self.img_size:  # as timm's PatchEmbed, which asserts it
            raise ValueError(
                f"images of {height}x{width} pixels, but the model is set to {self.img_size[0]}x"
                f"{self.img_size[1]}; call model.set_input_size(({height}, {width}))"
            )
        tokens_BND: Tensor = self.stem(image_BCHW)
        return tokens_BND


def stem_module(stem: Stem) -> str:
    """The module that is written beside a file whose stem timm does not have.

    A file of ours holds one stem and has its name; one of a user's own may hold several.
    """
    kind = type(stem)
    package, _, file = kind.__module__.rpartition(".")
    return f"mimkit_stem_{file}{'' if package == STEMS.package else f'_{kind.__name__}'}"


def stem_file(stem: Stem) -> str:
    """The source of that module: the stem, and `embed_layer` for timm."""
    kind = type(stem)
    header = f"{kind.__name__}, a stem of mimkit, for timm's VisionTransformer; made by an export."
    text = standalone(kind, StemEmbed, header=header)
    return text + _STEM_FILE.format(stem=kind.__name__)
