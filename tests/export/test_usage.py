"""The lines on a card, as a user runs them: beside the export, in a process without mimkit."""

import subprocess
import sys

import pytest
import torch
from cases import export, formats, images, make_encoder

BEFORE = """
import importlib.abc, sys, torch

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "mimkit":
            raise ImportError("blocked: " + name)

sys.path.insert(0, "")
if sys.argv[1] == "blocked":
    sys.meta_path.insert(0, Blocked())
expected = torch.load("expected.pt")
images = expected["images"]
torch.set_grad_enabled(False)
"""
AFTER = """
difference = float((torch.as_tensor(tokens) - expected["tokens"]).abs().max())
assert ("mimkit" in sys.modules) == (sys.argv[1] != "blocked")
print("equal" if difference <= float(sys.argv[2]) else difference)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", formats())
@pytest.mark.parametrize(
    ("stem", "settings"),
    [("linear", {}), ("linear", {"positions": "relative"}), ("hmlp", {"branches": 2}),
     ("local", {})],
)  # fmt: skip
def test_the_lines_of_the_card_work_alone(tmp_path, name, stem, settings) -> None:
    model = make_encoder(stem, grid=(2, 2), depth=1, **settings).eval()
    report = export(model, tmp_path / "encoder", name)
    with torch.no_grad():
        tokens_BND = model(images((2, 2)))
    torch.save({"images": images((2, 2)), "tokens": tokens_BND}, tmp_path / "expected.pt")
    code = "\n".join([BEFORE, report.usage, AFTER])
    alone = "blocked" if name != "safetensors" else "open"
    ended = subprocess.run(
        [sys.executable, "-c", code, alone, str(report.tolerance)],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
        env={"HF_MODULES_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "PATH": "",
             "HOME": str(tmp_path), **_path_of_mimkit(name)},
    )  # fmt: skip
    assert ended.stdout.strip().splitlines()[-1:] == ["equal"], ended.stderr


def _path_of_mimkit(name: str) -> dict[str, str]:
    """Ours loads by mimkit itself, wherever it is installed."""
    import mimkit

    return {"PYTHONPATH": mimkit.__path__[0].rpartition("/")[0]} if name == "safetensors" else {}
