"""Encoders of others as ours: BEiT, MAE, DeiT-III, DINOv2, timm's and transformers' weights.

How each names its weights is a table (`schemes`). Nothing in a file is executed, every weight is
accounted for (`Coverage`), and what our encoder cannot hold is refused by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mimkit.errors import UserError
from mimkit.importing._coverage import LEAST, Coverage, covered, recognised
from mimkit.importing._file import read_weights
from mimkit.importing._filled import filled
from mimkit.importing._names import renamed, some
from mimkit.importing._notes import about
from mimkit.importing.schemes import LEFT_OUT, REFUSED, SCHEMES, Pixels
from mimkit.models.encoder import ImageEncoder
from mimkit.registry import nearest
from mimkit.weight_names import fitting

__all__ = ["LEAST", "SCHEMES", "Coverage", "Imported", "import_weights", "their_weights"]


@dataclass(frozen=True)
class Imported:
    """An encoder in eval mode, in float32, and how it came about.

    Attributes:
        scheme: the key of `SCHEMES` by which the weights were named.
        wrapper, prefix: what stood around the names: see `Found`.
        pixels_given: whether the caller said mean and std; else they are the scheme's default.
        notes: what a person should know, a sentence each.
    """

    encoder: ImageEncoder
    scheme: str
    coverage: Coverage
    wrapper: str
    prefix: str
    mean: Pixels
    std: Pixels
    pixels_given: bool
    notes: Sequence[str]


def import_weights(
    path: Path,
    *,
    scheme: str | None = None,
    heads: int | None = None,
    image_size: tuple[int, int] | None = None,
    mean: Pixels | None = None,
    std: Pixels | None = None,
) -> Imported:
    """The encoder in a file of somebody else's.

    Args:
        path: safetensors, a .pth of torch.save, or a folder with model.safetensors.
        scheme: how its weights are named; None to recognise it.
        heads: number of heads; None for what the weights say, or a config.json beside them, or
            the width's standard.
        image_size: height and width in pixels the positions belong to; None for a square.
        mean, std: of the pixels it was trained on; None for the scheme's default.

    Raises:
        UserError: the file is damaged, hostile, of a newer mimkit or mimkit's own; less than 95 %
            of its encoder was used or of ours filled; or our encoder cannot hold it.
    """
    if (mean is None) != (std is None):
        raise UserError("mean and std of the pixels belong together; give both or neither")
    found = read_weights(path)
    key = _known(scheme) if scheme else recognised(list(found.weights))
    named = SCHEMES[key]
    _refuse(path, found.weights)
    coverage = covered(list(found.weights), named)
    _check(path, key, coverage, coverage.of_theirs)
    theirs = _under_our_names(found.weights, coverage)
    heads = found.heads if heads is None else heads
    encoder, coverage = filled(theirs, coverage, heads=heads, image_size=image_size)
    _check(path, key, coverage, coverage.share)
    if coverage.unfilled:
        raise UserError(
            f"{path} lacks {some(coverage.unfilled)} of {key} ({SCHEMES[key].what}), which would "
            "stay as in a new encoder; a part of the file is missing: fetch it again"
        )
    default_mean, default_std = named.pixels
    return Imported(
        encoder=encoder,
        scheme=key,
        coverage=coverage,
        wrapper=found.wrapper,
        prefix=found.prefix,
        mean=mean or default_mean,
        std=std or default_std,
        pixels_given=mean is not None,
        notes=about(found, named, theirs, encoder, heads),
    )


def their_weights(encoder: ImageEncoder, scheme: str) -> dict[str, Tensor]:
    """An encoder's weights under the names of a scheme: the tables read the other way.

    Names only: biases and positions keep our shapes, so schemes that split queries, keys and
    values, or have no position of the class token, are not made this way.

    Raises:
        UserError: the scheme has no name for a weight.
    """
    named = SCHEMES[_known(scheme)]
    table = {**named.positions.get(encoder.encoder.positions, {}), **named.table}
    moved = {name: renamed(name, table) for name in encoder.state_dict()}
    if nameless := [name for name, theirs in moved.items() if theirs is None]:
        raise UserError(f"scheme {scheme} has no name for {some(nameless)}")
    return {str(moved[name]): weight for name, weight in encoder.state_dict().items()}


def _known(scheme: str) -> str:
    if scheme not in SCHEMES:
        raise UserError(
            f"there is no scheme '{scheme}'.{nearest(scheme, list(SCHEMES))} Known: "
            f"{', '.join(SCHEMES)}"
        )
    return scheme


def _refuse(path: Path, names: Mapping[str, Tensor]) -> None:
    for name in names:
        if not fitting(name, LEFT_OUT) and (pattern := fitting(name, REFUSED)):
            raise UserError(
                f"{path} has '{name}', which an encoder of mimkit cannot hold: {REFUSED[pattern]}"
            )


def _under_our_names(weights: Mapping[str, Tensor], coverage: Coverage) -> dict[str, Tensor]:
    theirs = dict[str, Tensor]()
    for name, ours in coverage.used.items():
        if ours in theirs:
            raise UserError(f"the file has the weight '{name}' twice, under another name too")
        theirs[ours] = weights[name].float()
    return theirs


def _check(path: Path, key: str, coverage: Coverage, share: float) -> None:
    if share >= LEAST:
        return
    used, encoder = len(coverage.used), len(coverage.used) + len(coverage.unused)
    if not used:
        raise UserError(_none_known(path, key, coverage.unused))
    lists = {"not used": coverage.unused, "not filled": coverage.unfilled}
    listed = "; ".join(f"{what}: {some(names)}" for what, names in lists.items() if names)
    raise UserError(
        f"{path}: the nearest scheme is {key} ({SCHEMES[key].what}), but it uses only {used} of "
        f"{encoder} weights"
        + (f" and fills {len(coverage.filled)} of ours" if coverage.unfilled else "")
        + f", {share:.0%} where {LEAST:.0%} are needed; {listed}. Name another with --scheme: "
        f"{', '.join(SCHEMES)}"
    )


def _none_known(path: Path, key: str, names: Sequence[str]) -> str:
    said = f"its {len(names)} names are {some(names, limit=6)}"
    nearest_key = recognised(names)
    if covered(names, SCHEMES[nearest_key]).used:
        return (
            f"{path} has no weight under a name of {key} ({SCHEMES[key].what}); {said}, as in "
            f"{nearest_key}: leave --scheme out"
        )
    known = "; ".join(f"{name} ({scheme.what})" for name, scheme in SCHEMES.items())
    return (
        f"{path} has no weight under a name that mimkit knows; {said}. Is it an encoder of images, "
        f"and which? mimkit reads {known}"
    )
