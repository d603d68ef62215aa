"""What parts of a user's own promise, tried on little before anything is trained.

Parts of the package are held to it by contract tests; code outside is not seen by those.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mimkit.batch import Grid
from mimkit.errors import UserError, last_line_in
from mimkit.masks import Mask
from mimkit.models.mask_at import MaskAt
from mimkit.models.stems import STEMS, Stem
from mimkit.random import Purpose, generator
from mimkit.tokenizers import VisualTokenizer

_GRID = 2, 3  # patches of the image that is tried
_DRAWS = 8  # masks


def is_users_own(name: str) -> bool:
    """Whether a part's name says where its code is, `mine.py:Mine`."""
    return ":" in name


def check_stem(stem: Stem, name: str, *, width: int, patch_size: int) -> None:
    """UserError says what a stem does, and what `Stem` promises instead."""
    check = _Contract("stem", name, stem)
    check.has("forward", "reach_sides", "settings")
    check.equal("width", stem.width, width)
    check.equal("patch_size", stem.patch_size, patch_size)
    with check.running("reach_sides"):
        sides = stem.reach_sides
    pair = isinstance(sides, tuple) and [type(side) for side in sides] == [int, int]
    check.true(pair and min(sides) >= 0, f"reach_sides is {sides!r}",
               "pixels before and behind its patch that a token sees, (0, 0) for none")  # fmt: skip
    rows, columns = _GRID
    image_BCHW = _noise(rows * patch_size, columns * patch_size)
    mask_BN = torch.zeros(2, rows * columns, dtype=torch.bool)
    mask_BN[:, 0] = True
    for mask, called in ((None, "forward(image, None)"), (mask_BN, "forward(image, mask)")):
        with check.running(called), _still(stem):
            tokens_BND = stem(image_BCHW, mask)
        check.tensor(called, tokens_BND, (2, rows * columns, width), "tokens, patches row by row")
    with check.running("settings"):
        settings = stem.settings
    with check.running(f"{name.rpartition(':')[2]}(**settings), settings being {settings!r},"):
        again = STEMS[name](**settings)
    check.equal("settings: the stem that they build has weights", _shapes(again), _shapes(stem))


def check_mask(mask: Mask, name: str, *, grid: Grid) -> None:
    """UserError says what a mask does, and what `Mask` promises instead."""
    check = _Contract("mask", name, mask)
    check.equal("grid", tuple(mask.grid), tuple(grid))
    rng = generator(Purpose.MASK, seed=0)
    for _ in range(_DRAWS):
        with check.running("a draw"):
            drawn_N = mask(rng)
        check.true(isinstance(drawn_N, np.ndarray) and drawn_N.dtype == bool
                   and drawn_N.shape == (grid[0] * grid[1],), f"a draw is {_of(drawn_N)}",
                   f"an array of {grid[0] * grid[1]} bool, row by row")  # fmt: skip
        masked = int(drawn_N.sum())
        fits = masked == mask.num_masked if mask.exact else masked <= mask.num_masked
        check.true(fits, f"a draw masks {masked} patches",
                   f"{'' if mask.exact else 'at most '}num_masked={mask.num_masked}"
                   f"{' (or set exact = False)' if mask.exact else ''}")  # fmt: skip


def check_mask_at(mask_at: MaskAt, name: str, *, stem: Stem) -> None:
    """UserError says what a placement does, and what `MaskAt` promises instead."""
    check = _Contract("mask_at", name, mask_at)
    (rows, columns), patch = _GRID, stem.patch_size
    image_BCHW = _noise(rows * patch, columns * patch)
    mask_BN = torch.zeros(2, rows * columns, dtype=torch.bool)
    mask_BN[:, 0] = True
    with check.running("hidden()"):
        hidden_BN = mask_at.hidden(mask_BN, stem=stem, grid=_GRID)
    check.true(isinstance(hidden_BN, Tensor) and hidden_BN.dtype == torch.bool
               and hidden_BN.shape == mask_BN.shape, f"hidden() gives {_of(hidden_BN)}",
               f"a tensor of bool, {tuple(mask_BN.shape)}")  # fmt: skip
    check.true(bool((hidden_BN | ~mask_BN).all()), "hidden() leaves masked patches visible",
               "all that are masked to be hidden, and more if need be")  # fmt: skip
    with check.running("tokens()"), _still(stem):
        tokens_BND = mask_at.tokens(stem, image_BCHW, mask_BN, torch.zeros(1, 1, stem.width))
    check.tensor("tokens()", tokens_BND, (2, rows * columns, stem.width), "tokens")


def check_tokenizer(tokenizer: VisualTokenizer, name: str) -> None:
    """UserError says what a tokenizer does, and what `VisualTokenizer` promises instead."""
    check = _Contract("tokenizer", name, tokenizer)
    check.has("encode")
    for value in ("patch", "prediction_dim", "vocabulary", "fingerprint"):
        check.true(hasattr(tokenizer, value), f"it has no {value}", f"self.{value} to be set")
    rows, columns = _GRID
    view_BChw = _noise(rows * tokenizer.patch, columns * tokenizer.patch)
    with check.running("encode(view)"), torch.no_grad():
        target = tokenizer.encode(view_BChw)
    if tokenizer.vocabulary is None:
        check.tensor("encode(view)", target, (2, rows * columns, tokenizer.prediction_dim),
                     "targets")  # fmt: skip
        check.true(type(tokenizer).loss is not VisualTokenizer.loss, "it has no loss of its own",
                   "loss(predicted_MV, target_MV), since its targets are no tokens")  # fmt: skip
        return
    check.equal("prediction_dim", tokenizer.prediction_dim, tokenizer.vocabulary)
    shape = (2, rows * columns)
    check.true(isinstance(target, Tensor) and target.dtype == torch.int64
               and tuple(target.shape) == shape, f"encode(view) gives {_of(target)}",
               f"a tensor of int64, {shape}: a token a patch, row by row")  # fmt: skip
    least, most = int(target.min()), int(target.max())
    check.true(least >= 0 and most < tokenizer.vocabulary, f"tokens are {least} to {most}",
               f"0 to {tokenizer.vocabulary - 1}, by its vocabulary")  # fmt: skip


class _Contract:
    """One part of a user's own, by the name it was given."""

    def __init__(self, kind: str, name: str, part: object) -> None:
        self._name, self._part = f"{kind} '{name}'", part
        self._file = getattr(sys.modules.get(type(part).__module__), "__file__", "")

    def true(self, holds: bool, found: str, expected: str) -> None:
        if not holds:
            raise UserError(f"{self._name}: {found}; expected {expected} (docs/parts.md)")

    def equal(self, what: str, found: Any, expected: Any) -> None:
        self.true(found == expected, f"{what} is {found!r}", repr(expected))

    def has(self, *members: str) -> None:
        """Methods and properties that the contract leaves open."""
        for member in members:
            open_ = getattr(getattr(type(self._part), member), "__isabstractmethod__", False)
            self.true(not open_, f"it has no {member}", f"a class that defines {member}")

    def tensor(self, what: str, found: Any, shape: tuple[int, ...], meaning: str) -> None:
        right = isinstance(found, Tensor) and found.is_floating_point() and found.shape == shape
        self.true(right, f"{what} gives {_of(found)}", f"a tensor of float, {shape}: {meaning}")
        self.true(bool(found.isfinite().all()), f"{what} is not finite", "finite numbers")

    @contextmanager
    def running(self, what: str) -> Iterator[None]:
        """Around code of the user's own; the last of its lines is named."""
        try:
            with torch.random.fork_rng(devices=[]):
                yield
        except UserError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise UserError(
                f"{self._name}: {what} fails{self._line(error)}: {why} (docs/parts.md)"
            ) from error

    def _line(self, error: Exception) -> str:
        number = last_line_in(error, self._file)
        return "" if number is None else f" in {self._file}, line {number}"


@contextmanager
def _still(module: nn.Module) -> Iterator[None]:
    """In eval mode and without gradients, so that no statistics move."""
    training = module.training
    try:
        with torch.no_grad():
            module.eval()
            yield
    finally:
        module.train(training)


def _noise(height: int, width: int) -> Tensor:
    """Two images in [0, 1]."""
    return torch.rand(2, 3, height, width, generator=torch.Generator().manual_seed(0))


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _of(found: Any) -> str:
    """What something is, for a message."""
    if isinstance(found, Tensor | np.ndarray):
        kind = "a tensor" if isinstance(found, Tensor) else "an array"
        return f"{kind} of {str(found.dtype).removeprefix('torch.')}, {tuple(found.shape)}"
    return repr(found)
