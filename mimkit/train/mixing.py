"""What is done to a batch on the device: erasing, then mixup and cutmix, by timm, in fixed groups.

timm mixes a rank's batch as it comes, so its numbers depend on how many ranks there are. Here each
`group` consecutive rows of the global batch are one batch to timm, and what is drawn is keyed by
the update and the row: ranks and accumulation only decide who computes what.
"""

from dataclasses import dataclass

import torch
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from mimkit.errors import UserError
from mimkit.random import Purpose, generator, seeded_globals


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """(image_BCHW, label_B) -> images and what to predict: labels (B,), or shares (B, V).

    Args:
        num_classes: V.
        mixup, cutmix: alphas; both 0 for no mixing. With both, each is as likely.
        smoothing: of labels, in the shares; where nothing is mixed the loss smooths.
        group: rows of the global batch that are mixed with each other: the first with the last.
        erasing: share of the images that lose a rectangle to noise, as in timm and BEiT.
        seed: of the run.
    """

    num_classes: int
    mixup: float
    cutmix: float
    smoothing: float
    group: int
    erasing: float
    seed: int

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def check(self, *, micro_batch: int) -> None:
        """UserError where a rank's rows are no whole groups."""
        if not self.mixes or micro_batch % self.group == 0:
            return
        fits = [d for d in range(2, micro_batch + 1, 2) if micro_batch % d == 0]
        remedy = f"set train.mix_group to a divisor of it, for example {fits[-1]}" if fits else (
            "an odd number of images cannot be mixed in pairs: change train.batch_size"
        )  # fmt: skip
        raise UserError(
            f"a rank has {micro_batch} images at a time, which is no multiple of "
            f"train.mix_group={self.group}; {remedy}, or set train.mixup=0 and train.cutmix=0"
        )

    def __call__(
        self, image_BCHW: Tensor, label_B: Tensor, *, update: int, rows: slice
    ) -> tuple[Tensor, Tensor]:
        """`rows`: which of the global batch these are. The images are changed in place."""
        self._erase(image_BCHW, update=update, first=rows.start)
        if not self.mixes:
            return image_BCHW, label_B
        shares = [
            self._mix(image_BCHW[at : at + self.group], label_B[at : at + self.group],
                      update=update, number=(rows.start + at) // self.group)
            for at in range(0, len(label_B), self.group)
        ]  # fmt: skip
        return image_BCHW, torch.cat(shares)

    def _erase(self, image_BCHW: Tensor, *, update: int, first: int) -> None:
        if not self.erasing:
            return
        erase = RandomErasing(self.erasing, mode="pixel", device="cpu")  # type: ignore[no-untyped-call]
        for row, image_CHW in enumerate(image_BCHW, first):
            key = generator(Purpose.ERASE, seed=self.seed, epoch=update, sample=row)
            with seeded_globals(key):
                erase(image_CHW)

    def _mix(self, image_GCHW: Tensor, label_G: Tensor, *, update: int, number: int) -> Tensor:
        mix = Mixup(  # type: ignore[no-untyped-call]
            mixup_alpha=self.mixup,
            cutmix_alpha=self.cutmix,
            label_smoothing=self.smoothing,
            num_classes=self.num_classes,
        )
        key = generator(Purpose.MIX, seed=self.seed, epoch=update, sample=number)
        with seeded_globals(key):
            mixed_GCHW, share_GV = mix(image_GCHW, label_G)
        assert mixed_GCHW is image_GCHW, "timm mixes in place"
        share: Tensor = share_GV
        return share
