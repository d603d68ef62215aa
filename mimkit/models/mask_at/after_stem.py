"""The paper's placement: the stem sees the whole image, then tokens of masked patches go."""

from mimkit.models.mask_at import MASK_AT, MaskAt


@MASK_AT.register
class AfterStem(MaskAt):
    """Tokens of masked patches are replaced by the mask token behind the stem (BEiT; P, section 5).

    What of the pixels under the mask still reaches visible tokens depends on the stem: nothing for
    patchwise stems without batch statistics, a good deal for overlapping convolutions
    (`tools/audit.py leak` measures it).
    """
