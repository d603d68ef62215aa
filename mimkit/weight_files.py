"""What can be said of a file of weights that a library refuses: whether its end is missing."""

import json
from pathlib import Path

_LONGEST_HEADER = 100 << 20  # bytes; what safetensors itself reads at most


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
