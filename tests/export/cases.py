"""Small encoders of every kind, images for them, and their exports."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from mimkit.export import EXPORTERS, ExportReport
from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.init import initialise
from mimkit.models.stems import STEMS

HALF = (0.5, 0.5, 0.5)
WHOLE_MATRIX = bool(os.environ.get("WHOLE_MATRIX"))


def formats() -> list:
    """Every format as a parameter; graphs take seconds each, and packages of an extra may be
    missing."""
    found = []
    for name in EXPORTERS.names():
        exporter = EXPORTERS[name]()
        missing = [package for package in exporter.packages if find_spec(package) is None]
        marks = [pytest.mark.skipif(bool(missing), reason=f"not installed: {missing}")]
        marks += [pytest.mark.slow] if writes_graph(name) else []
        found.append(pytest.param(name, marks=marks))
    return found


def writes_graph(name: str) -> bool:
    """Whether the format traces the model, which takes seconds."""
    return not EXPORTERS[name]().casts


def each_format(*cases: tuple) -> list:
    """(format, *case): every case in every format, but the first alone where a graph is written;
    with WHOLE_MATRIX=1 all."""
    return [
        pytest.param(*one.values, *case, marks=one.marks)
        for one in formats()
        for number, case in enumerate(cases)
        if WHOLE_MATRIX or number == 0 or not writes_graph(*one.values)
    ]


def make_encoder(stem: str = "linear", *, stem_settings=None, **settings) -> ImageEncoder:
    """2x3 patches of 16 pixels, every weight away from where it starts; in train mode."""
    made = STEMS[stem](width=32, **(stem_settings or ({"depth": 1} if stem == "local" else {})))
    encoder = Encoder(**{"width": 32, "heads": 4, "depth": 3, "grid": (2, 3), **settings})
    model = ImageEncoder(made, encoder)
    initialise(model, seed=0)
    disturb(model)
    model.train()(images(encoder.grid))  # running statistics move
    return model


def disturb(model: torch.nn.Module) -> None:
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # more, and the stem's own rounding comes near 1e-5
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.05)


def images(grid: tuple[int, int] = (2, 3), *, num: int = 4) -> torch.Tensor:
    draw = torch.Generator().manual_seed(2)
    return torch.randn(num, 3, *(16 * side for side in grid), generator=draw)


def export(model: ImageEncoder, path: Path, name: str = "timm", **settings) -> ExportReport:
    return EXPORTERS[name]().export(
        model,
        path,
        **{
            "image_BCHW": images(model.encoder.grid),
            "mean": HALF,
            "std": HALF,
            "metadata": {"run": "a test"},
            **settings,
        },
    )
