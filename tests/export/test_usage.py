"""The lines on a card, as a user runs them: beside the export, in a process without mimkit."""

import subprocess
import sys

import pytest
import torch
from cases import export, formats, images, make_encoder, writes_graph

from mimkit.export import EXPORTERS

BEFORE = """
import importlib.abc, os, sys, torch

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "mimkit":
            raise ImportError("blocked: " + name)

sys.path.insert(0, "")
if sys.argv[1] == "blocked":
    sys.meta_path.insert(0, Blocked())
torch.set_grad_enabled(False)
root = os.getcwd()
"""
EACH = """
os.chdir(f"{{root}}/{folder}")
expected = torch.load("expected.pt")
images = expected["images"]
{usage}
difference = float((torch.as_tensor(tokens) - expected["tokens"]).abs().max())
assert ("mimkit" in sys.modules) == (sys.argv[1] != "blocked")
print("equal" if difference <= float(sys.argv[2]) else difference)
"""
MODELS = {
    "linear": {},
    "relative": {"positions": "relative"},
    "hmlp": {"branches": 2},
    "local": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", formats())
def test_the_lines_of_the_card_work_alone(tmp_path, name) -> None:
    """One process for all models: libraries take longer to import than models to run. The lines
    for a graph are the same for every model."""
    parts, exporter = [BEFORE], EXPORTERS[name]()
    models = {"hmlp": MODELS["hmlp"]} if writes_graph(name) else MODELS
    for folder, settings in models.items():
        stem = "linear" if folder == "relative" else folder
        model = make_encoder(stem, grid=(2, 2), depth=1, **settings).eval()
        (tmp_path / folder).mkdir()
        report = export(model, tmp_path / folder / "encoder", name)
        with torch.no_grad():
            expected = {"images": images((2, 2)), "tokens": model(images((2, 2)))}
        torch.save(expected, tmp_path / folder / "expected.pt")
        parts.append(EACH.format(folder=folder, usage=report.usage))
    alone = "blocked" if name != "safetensors" else "open"
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(parts), alone, str(exporter.tolerance)],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
        env={"HF_MODULES_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "PATH": "",
             "HOME": str(tmp_path), **_path_of_mimkit(name)},
    )  # fmt: skip
    said = [line for line in ended.stdout.splitlines() if line.strip()]
    assert said[-len(models) :] == ["equal"] * len(models), ended.stderr


def _path_of_mimkit(name: str) -> dict[str, str]:
    """Ours loads by mimkit itself, wherever it is installed."""
    import mimkit

    return {"PYTHONPATH": mimkit.__path__[0].rpartition("/")[0]} if name == "safetensors" else {}
