"""Small models for the tests of this folder."""

from collections.abc import Callable

import pytest

from mimkit.models.encoder import Encoder
from mimkit.models.init import initialise
from mimkit.models.mim import MaskedImageModel
from mimkit.models.stems import STEMS

MakeModel = Callable[..., MaskedImageModel]


@pytest.fixture
def make_model() -> MakeModel:
    """A model on images of 32x48 pixels, grid 2x3; arguments go to the encoder."""

    def make(stem: str = "linear", *, stem_settings=None, seed: int = 0, **settings):
        stem_built = STEMS[stem](width=32, patch_size=16, **(stem_settings or {}))
        encoder = Encoder(**{"width": 32, "heads": 4, "depth": 3, "grid": (2, 3), **settings})
        model = MaskedImageModel(stem=stem_built, encoder=encoder, prediction_dim=50)
        initialise(model, seed=seed)
        return model

    return make
