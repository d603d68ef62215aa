"""Pixels are the same on machines of other instruction sets: of torch, decoder and kernels."""

from pathlib import Path

import numpy as np
import pytest
from commands import command

SCRIPT = """
import hashlib, sys
from pathlib import Path
from mimkit.data.views import TwoViews
from mimkit.random import Purpose, generator
views, digest = TwoViews(image_size=48, token_size=24), hashlib.sha256()
for number, path in enumerate(sorted(Path(sys.argv[1]).iterdir())):
    for view in views(path.read_bytes(), generator(Purpose.VIEW, seed=0, sample=number)):
        digest.update(view.numpy().tobytes())
print(digest.hexdigest())
"""
MACHINES: dict[str, dict[str, str]] = {
    "this one": {},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "NUMBA_CPU_NAME": "haswell"},
    "none": {"ATEN_CPU_CAPABILITY": "default", "NUMBA_CPU_NAME": "generic", "JSIMD_FORCENONE": "1"},
}


@pytest.mark.slow
def test_views_do_not_depend_on_the_instruction_set(jpegs: list[bytes], tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for number, content in enumerate(jpegs):
        (tmp_path / "images" / f"{number:02d}.jpg").write_bytes(content)
    found = {}
    for name, variables in MACHINES.items():
        kept = {"NUMBA_CACHE_DIR": str(tmp_path / name)}
        ended = command(["-c", SCRIPT, tmp_path / "images"], cwd=tmp_path, env=variables | kept)
        assert ended.code == 0, ended.err
        found[name] = ended.out.strip()
    assert len(set(found.values())) == 1, found
    assert len(found["none"]) == 64
    assert np.unique([len(content) for content in jpegs]).size > 10, "images of several kinds"
