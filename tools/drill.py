"""Break small runs on purpose: `python tools/drill.py --short`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mimkit.cli import door

if __name__ == "__main__":
    door(["drill", *sys.argv[1:]])
