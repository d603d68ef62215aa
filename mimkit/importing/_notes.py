"""What a person should know of an import besides its coverage."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mimkit.importing._file import Found
from mimkit.importing.schemes import Scheme
from mimkit.models.encoder import ImageEncoder


def about(
    found: Found,
    scheme: Scheme,
    theirs: Mapping[str, Tensor],
    encoder: ImageEncoder,
    heads: int | None,
) -> list[str]:
    """A sentence each.

    Args:
        theirs: weights under our names, as they are in the file.
        heads: what was said about them; None where nothing was.
    """
    notes = [scheme.note] if scheme.note else []
    if heads is None and not encoder.encoder.relative:
        notes.append(
            f"nothing in the file says the number of heads; {encoder.encoder.heads} are usual for "
            f"a width of {encoder.encoder.width}, --heads takes others"
        )
    dtypes = {weight.dtype for weight in found.weights.values() if weight.is_floating_point()}
    if narrow := sorted(str(d).removeprefix("torch.") for d in dtypes - {torch.float32}):
        notes.append(f"weights were {', '.join(narrow)} in the file and are float32 now")
    positions = theirs.get("encoder.pos_embed")
    rows, columns = encoder.encoder.grid
    if positions is not None and positions.shape[1] == rows * columns:
        notes.append("its positions leave the class token out, which gets zeros: the same numbers")
    if isinstance(encoder.encoder.norm, nn.Identity):
        notes.append("it has no norm behind the last block (it pools first), and so has ours")
    return notes
