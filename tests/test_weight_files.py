"""Equal weights make equal files, which safetensors reads as what was written."""

import itertools
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mimkit.weight_files import write_safetensors

METADATA = {"format": "pt", "a": 'é \\ "', "classes": '["cat"]', "b": "", "mimkit_format": "x.1"}
TENSORS = {"wide": torch.arange(6.0).reshape(2, 3).T, "one": torch.tensor([3], dtype=torch.int64),
           "half": torch.ones(5, dtype=torch.bfloat16)}  # fmt: skip


def test_equal_content_is_equal_bytes(tmp_path: Path) -> None:
    """The library alone puts the metadata in another order each time."""
    written = set()
    for order in itertools.islice(itertools.permutations(METADATA), 0, 120, 17):
        path = tmp_path / "weights"
        write_safetensors(path, TENSORS, metadata={name: METADATA[name] for name in order})
        written.add(path.read_bytes())
    assert len(written) == 1


def test_the_library_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    write_safetensors(path, TENSORS, metadata=METADATA)
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == METADATA
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
