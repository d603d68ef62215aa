"""Put a delta and its base together: `tools/merge.py FINETUNED INIT OUT`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mimkit.cli import door

if __name__ == "__main__":
    door(["merge", *sys.argv[1:]])
