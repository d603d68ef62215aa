"""An encoder of ours with their weights in it, and what of it was found."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from mimkit.errors import UserError
from mimkit.importing._coverage import Coverage
from mimkit.importing._names import some
from mimkit.importing._sizes import make_encoder
from mimkit.importing._weights import joined_qkv, with_class_slot, with_one_bias
from mimkit.models.encoder import ImageEncoder
from mimkit.models.init import initialise


def filled(
    theirs: Mapping[str, Tensor],
    coverage: Coverage,
    *,
    heads: int | None,
    image_size: tuple[int, int] | None,
) -> tuple[ImageEncoder, Coverage]:
    """The encoder in eval mode, and the coverage with what was found of it.

    Args:
        theirs: weights under our names, as they are in the file.
        heads, image_size: see `make_encoder`.

    Raises:
        UserError: our encoder cannot hold them.
    """
    weights = with_one_bias(joined_qkv(theirs))
    encoder = make_encoder(weights, heads=heads, image_size=image_size)
    weights = with_class_slot(weights, encoder.encoder.grid)
    expected = encoder.state_dict()
    _check_shapes(weights, expected)
    if bad := [name for name, weight in weights.items() if not weight.isfinite().all()]:
        raise UserError(f"the file holds numbers that are not finite in {some(bad)}")
    unfilled = [name for name in expected if name not in weights]
    homeless = {name for name in weights if name not in expected}
    if unfilled:
        initialise(encoder, seed=0)
    encoder.load_state_dict({**encoder.state_dict(), **_without(weights, homeless)})
    return encoder.eval(), replace(
        coverage,
        used={name: ours for name, ours in coverage.used.items() if ours not in homeless},
        unused=[*coverage.unused, *(n for n, ours in coverage.used.items() if ours in homeless)],
        filled=[name for name in expected if name in weights],
        unfilled=unfilled,
    )


def _without(weights: Mapping[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    return {name: weight for name, weight in weights.items() if name not in names}


def _check_shapes(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    wrong = [
        f"{name} is {list(weights[name].shape)}, expected {list(expected[name].shape)}"
        for name in weights
        if name in expected and weights[name].shape != expected[name].shape
    ]
    if wrong:
        raise UserError(
            f"{len(wrong)} weights have shapes that an encoder of mimkit cannot hold: "
            f"{some(wrong, limit=3)}. Its MLPs are 4 times as wide as its tokens, and its "
            "positions belong to one grid; if that is it, --image-size HxW says which"
        )
