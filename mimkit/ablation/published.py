"""The paper's Table 7 (arXiv 2203.09795): ViT-B on ImageNet-1k. Printed beside ours, never mixed.

Supervised for 300 epochs, or BeiT for 300 epochs with targets of a tokenizer trained on ImageNet-1k
and 100 epochs of finetuning. A spread is the standard deviation over five runs where the paper
gives one; other rows are one run. There is no row for the stem of Xiao et al., and no probes.
"""

from typing import NamedTuple

from mimkit.errors import UserError
from mimkit.registry import nearest

SOURCE = "Touvron et al. 2022, Three things everyone should know about Vision Transformers, Table 7"
SETTING = "ViT-B, ImageNet-1k, 224 pixels, 300 epochs (BeiT: and 100 of finetuning)"


class Published(NamedTuple):
    """GFLOPs; top-1 in % on ImageNet-val, supervised and after BeiT, with standard deviations."""

    gflops: float
    supervised: float
    supervised_std: float | None
    beit: float
    beit_std: float | None


TABLE_7 = {
    "linear": Published(17.58, 82.20, 0.06, 83.05, 0.08),
    "linear BN": Published(17.58, 82.31, None, 82.98, None),
    "linear GELU": Published(17.58, 81.55, None, 83.09, None),
    "linear BN GELU": Published(17.58, 82.38, None, 82.99, None),
    "linear, 13 blocks": Published(19.04, 82.35, 0.12, 83.26, 0.06),
    "Graham BN": Published(19.07, 82.57, None, 83.04, None),
    "Graham LN": Published(19.07, 82.50, None, 83.06, None),
    "local transformer": Published(19.12, 82.26, None, 82.38, None),
    "hMLP BN": Published(17.73, 82.54, 0.09, 83.43, 0.10),
    "hMLP LN": Published(17.73, 82.50, 0.07, 83.24, 0.09),
}


def published(row: str) -> Published:
    """UserError where the table has no such row."""
    if row not in TABLE_7:
        raise UserError(
            f"the paper's Table 7 has no row '{row}'.{nearest(row, list(TABLE_7))} "
            f"Rows: {'; '.join(TABLE_7)}"
        )
    return TABLE_7[row]
