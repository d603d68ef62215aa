"""The view that a classifier trains on: crop, flip, and a policy of timm's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from mimkit.batch import Views
from mimkit.data.views import TwoViews
from mimkit.errors import UserError
from mimkit.random import Rng, seeded_globals

Policy = Callable[[Image.Image], Image.Image]


@dataclass(frozen=True, kw_only=True)
class AugmentedView:
    """What `crop` gives, through `policy`: a pure function of the image and the generator.

    As in timm's training transform: random resized crop, flip, policy. Erasing comes after the
    normalisation, hence on the device, see `mimkit.train.mixing`.

    Args:
        policy: see `make_policy`; None for none.
    """

    crop: TwoViews
    policy: Policy | None

    def __call__(self, encoded: bytes, rng: Rng) -> Views:
        """Raises DecodeError."""
        views = self.crop(encoded, rng)
        if self.policy is None:
            return views
        image = Image.fromarray(views.patch_view_CHW.permute(1, 2, 0).numpy())
        with seeded_globals(rng):
            image = self.policy(image)
        return views._replace(patch_view_CHW=torch.from_numpy(np.array(image)).permute(2, 0, 1)
                              .contiguous())  # fmt: skip


def make_policy(
    words: str, *, size: tuple[int, int], mean: tuple[float, ...], interpolation: str
) -> Policy:
    """timm's RandAugment ("rand-m9-mstd0.5-inc1"), AugMix ("augmix-m3-w3"), 3-Augment ("3a") or
    AutoAugment ("original", "v0", ...), set up as timm's own training transform does it.

    Args:
        size: height and width of the view, which bound how far it is shifted.
        mean: of the normalisation, in [0, 1]: what is shifted in.

    Raises:
        UserError: timm knows no such policy.
    """
    from timm.data import auto_augment

    makers = {"rand": "rand_augment_transform", "augmix": "augment_and_mix_transform",
              "3a": "auto_augment_transform"}  # fmt: skip
    settings: dict[str, Any] = {
        "translate_const": int(min(size) * 0.45),
        "img_mean": tuple(min(255, round(255 * value)) for value in mean),
        "interpolation": Image.Resampling[interpolation.upper()],
        **({"translate_pct": 0.3} if words.startswith("augmix") else {}),
    }
    maker = getattr(auto_augment, makers.get(words.partition("-")[0], "auto_augment_transform"))
    try:
        policy: Policy = maker(words, settings)
        policy(Image.new("RGB", size[::-1]))
    except (AssertionError, KeyError, ValueError, IndexError) as error:
        raise UserError(
            f"data.augment is '{words}', which timm does not know ({error}); examples: "
            "rand-m9-mstd0.5-inc1, rand-m7-mstd0.5-inc1, 3a, augmix-m3-w3, original; null for none"
        ) from error
    return policy
