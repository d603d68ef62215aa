"""Files of weights: equal ones are equal bytes; and of one that a library refuses, whether its end
is missing."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

_LONGEST_HEADER = 100 << 20  # bytes; what safetensors itself reads at most


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str]
) -> None:
    """What safetensors.torch.save_file writes, with the metadata in order of their names.

    The library's own order is another each time, and its file can only be read by its owner.
    """
    written = save({name: tensor.contiguous() for name, tensor in tensors.items()}, dict(metadata))
    end = 8 + int.from_bytes(written[:8], "little")
    header = json.loads(written[8:end])
    header["__metadata__"] = dict(sorted(metadata.items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(memoryview(written)[end:])


def cut_short(path: Path) -> str | None:
    """A sentence with both sizes where safetensors end too early, as a broken download does."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 9 or length > _LONGEST_HEADER or file.read(1) != b"{":
            return None
        if size < 8 + length:
            return f"it ends within its header: it has {size:,} bytes, the header alone {length:,}"
        file.seek(8)
        try:
            entries = json.loads(file.read(length)).values()
            end = max(entry["data_offsets"][1] for entry in entries if "data_offsets" in entry)
        except (ValueError, TypeError, KeyError, IndexError):
            return None
    expected = 8 + length + int(end)
    if size >= expected:
        return None
    return f"it has {size:,} of {expected:,} bytes, so its end is missing: fetch it again"
