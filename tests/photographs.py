"""Real photographs that a dependency carries, and crops of them as files."""

import importlib.util
import io
from pathlib import Path

import numpy as np
from PIL import Image


def _folder() -> Path:
    spec = importlib.util.find_spec("skimage")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "data"


PHOTOGRAPHS = _folder()


def as_jpeg(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=92)
    return buffer.getvalue()
