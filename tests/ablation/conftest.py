"""A study of seconds: two stems, two seeds, plain PyTorch, 4 x 4 patches."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from mimkit.config import StudyConfig, load_study_config
from mimkit.config._yaml import merge_overrides
from mimkit.models.stems import STEMS


@pytest.fixture(scope="session")
def tiny_study(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its configuration file; `folder` is beside it."""
    home = tmp_path_factory.mktemp("study")
    settings = merge_overrides([*tiny, "train.steps=4", "output.checkpoint_every=4",
                                "output.evaluate_every=4", "output.picture_every=4"])  # fmt: skip
    study = {
        "name": "tiny",
        "folder": str(home / "study"),
        "settings": settings,
        "arms": {
            "linear": {"settings": {"stem": {"name": "linear"}}, "paper": "linear"},
            "two_blocks": {
                "settings": {"stem": {"name": "linear"}, "encoder": {"depth": 2}},
                "declares": ["encoder.depth"],
            },
            "hmlp": {"settings": {"stem": {"name": "hmlp"}}, "paper": "hMLP BN"},
        },
        "reference": "linear",
        "control": "two_blocks",
        "seeds": [0, 1],
        "probes": {"knn": {"neighbours": [5]}},
        "probe_images": [96, 24],
        "primary": "knn",
    }
    path = home / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False), encoding="utf-8")
    return path


@pytest.fixture
def study(tiny_study: Path) -> StudyConfig:
    return load_study_config(tiny_study)


BROKEN = """
from mimkit.models.stems.linear import Linear
class Broken(Linear):
    def forward(self, image_BCHW, mask_BN=None):
        if mask_BN is not None and self.training:  # not while arms are timed, nor when it is tried
            raise RuntimeError("the stem fell off")
        return super().forward(image_BCHW, mask_BN)
"""


@pytest.fixture
def broken_stem(tmp_path: Path) -> str:
    """Its name, of a part that fails in training."""
    (tmp_path / "broken.py").write_text(BROKEN)
    return f"{tmp_path}/broken.py:Broken"


MINE = """
from mimkit.models.stems.linear import Linear
class Mine(Linear):
    def forward(self, image_BCHW, mask_BN=None):
        return SCALE * super().forward(image_BCHW, mask_BN)
"""


@pytest.fixture
def own_stem(tmp_path: Path) -> Callable[[int], str]:
    """Its name, of a user's own part; writes its file, as if this process had not loaded it yet."""

    def write(scale: int) -> str:
        name = f"{tmp_path}/mine.py:Mine"
        (tmp_path / "mine.py").write_text(MINE.replace("SCALE", str(scale)))
        STEMS._parts.pop(name, None)
        for module in [one for one in sys.modules if one.startswith("mimkit_plugged_")]:
            del sys.modules[module]
        return name

    return write
