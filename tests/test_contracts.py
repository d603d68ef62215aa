"""Parts of a user's own that break their contract: one sentence, in seconds, and what was due."""

from pathlib import Path

import pytest
from commands import ROOT, pretrain

STEM = '''
import torch
from mimkit.models.stems import Stem
from mimkit.models.stems.linear import Linear

class Good(Linear):
    """As it should be."""

class Turned(Linear):
    def forward(self, image_BCHW, mask_BN=None):
        return super().forward(image_BCHW, mask_BN).transpose(1, 2)

class Empty(Stem):
    def __init__(self, *, width, patch_size):
        super().__init__()
        self.width, self.patch_size = width, patch_size

    def forward(self, image_BCHW, mask_BN=None):
        return image_BCHW

class NoReach(Linear):
    reach_sides = None

class NoMask(Linear):
    def forward(self, image_BCHW):
        return super().forward(image_BCHW)

class Narrow(Linear):
    def __init__(self, *, width, patch_size):
        super().__init__(width=width // 2, patch_size=patch_size)

class Forgets(Linear):
    @property
    def settings(self):
        return {"width": 3, "patch_size": 8}

class Wanting(Linear):
    def __init__(self, *, width, patch_size, kernel: int = 3):
        super().__init__(width=width, patch_size=patch_size)
        self.before = torch.nn.Conv2d(3, 3, kernel, padding=kernel // 2)

    def forward(self, image_BCHW, mask_BN=None):
        return super().forward(self.before(image_BCHW), mask_BN)

    @property
    def settings(self):
        return {"width": self.width, "patch_size": self.patch_size, "kernel": 3}

class Nan(Linear):
    def forward(self, image_BCHW, mask_BN=None):
        return super().forward(image_BCHW, mask_BN) * torch.nan

class Raises(Linear):
    def forward(self, image_BCHW, mask_BN=None):
        return self.nowhere(image_BCHW)
'''
STEMS = {
    "Turned": "forward(image, None) gives a tensor of float32, (2, 192, 6); expected a tensor of "
    "float, (2, 6, 192): tokens",
    "Empty": "it has no reach_sides; expected a class that defines reach_sides",
    "NoReach": "reach_sides is None; expected pixels before and behind",
    "NoMask": "NoMask.forward() takes 2 positional arguments but 3 were given",
    "Narrow": "width is 96; expected 192",
    "Forgets": "settings: the stem that they build has weights",
    "Wanting": "sees at most 0 pixels beyond its patch; measured were 1",
    "Nan": "forward(image, None) is not finite",
    "Raises": "forward(image, None) fails in {file}, line 55: AttributeError: 'Raises' object has "
    "no attribute 'nowhere'",
}
OTHERS = """
import numpy as np
import torch
from mimkit.masks import Mask
from mimkit.models.mask_at import MaskAt
from mimkit.tokenizers import VisualTokenizer

class Few(Mask):
    def __init__(self, *, grid, num_masked: int):
        self.grid, self.num_masked = grid, num_masked

    def __call__(self, rng):
        return np.arange(self.grid[0] * self.grid[1]) < self.num_masked - 1

class Ints(Few):
    def __call__(self, rng):
        return super().__call__(rng).astype(int)

class Shows(MaskAt):
    def hidden(self, mask_BN, *, stem, grid):
        return torch.zeros_like(mask_BN)

class Words(VisualTokenizer):
    patch = 8

    def __init__(self, *, most: int = 4):
        super().__init__()
        self.prediction_dim = self.vocabulary = 4
        self.fingerprint, self.most = "words", most

    def encode(self, view_BChw):
        rows, columns = (side // 8 for side in view_BChw.shape[2:])
        token_N = torch.arange(rows * columns) % (self.most + 1)
        return token_N.expand(len(view_BChw), -1)

class Unnamed(Words):
    def __init__(self):
        super().__init__()
        del self.fingerprint

class Lossless(Words):
    def __init__(self):
        super().__init__()
        self.vocabulary = None

    def encode(self, view_BChw):
        return super().encode(view_BChw)[..., None].expand(-1, -1, 4).float()
"""
PARTS = {
    "mask=Few": "a draw masks 5 patches; expected num_masked=6 (or set exact = False)",
    "mask=Ints": "a draw is an array of int64, (16,); expected an array of 16 bool",
    "mask_at=Shows": "hidden() leaves masked patches visible",
    "tokenizer=Words": "tokens are 0 to 4; expected 0 to 3",
    "tokenizer=Unnamed": "it has no fingerprint; expected self.fingerprint to be set",
    "tokenizer=Lossless": "it has no loss of its own",
}


def _said(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert pretrain(words) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return " ".join(said.split())


@pytest.mark.parametrize("name", STEMS)
def test_a_stem_that_breaks_its_contract_is_refused_by_what_it_does(
    name: str, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stem.py"
    file.write_text(STEM)
    said = _said([*tiny, f"stem={file}:{name}", f"output.dir={tmp_path / 'run'}"], capsys)
    assert f"stem '{file}:{name}'" in said
    assert STEMS[name].format(file=file) in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("part", PARTS)
def test_so_is_any_other_part(
    part: str, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, (section, name) = tmp_path / "parts.py", part.split("=")
    file.write_text(OTHERS)
    words = [word for word in tiny if not word.startswith(f"{section}.path")]
    said = _said([*words, f"{section}={file}:{name}", f"output.dir={tmp_path / 'run'}"], capsys)
    assert f"{section} '{file}:{name}': {PARTS[part]}" in said


def test_one_that_keeps_it_trains(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stem.py").write_text(STEM)
    words = [f"stem={tmp_path}/stem.py:Good", "train.steps=1", f"output.dir={tmp_path / 'run'}"]
    assert pretrain([*tiny, *words]) == 0


def test_the_documented_stem_is_complete(tiny: list[str], tmp_path: Path) -> None:
    page = (ROOT / "docs" / "parts.md").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    stem = [f"stem={tmp_path}/mine.py:Mine", "stem.kernel=5"]
    assert pretrain([*tiny, *stem, "train.steps=1", f"output.dir={tmp_path / 'run'}"]) == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nowhere_at_all", "line 1: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("\nclass Mine(:\n", "line 2: SyntaxError: invalid syntax"),
        ("x = 1\ny = x / 0", "line 2: ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named_with_its_line(
    text: str, words: str, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(text)
    said = _said([*tiny, f"stem={tmp_path}/mine.py:Mine"], capsys)
    assert f"cannot be imported: {tmp_path}/mine.py, {words}" in said


def test_a_file_without_a_name_in_it_is_told_what_is_missing(
    tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "names a file and no class in it; write mine.py:NAME" in _said(
        [*tiny, "stem=mine.py"], capsys)  # fmt: skip
