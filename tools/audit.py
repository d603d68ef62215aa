"""Measure a part before hours are spent on it: `python tools/audit.py mask`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mimkit.cli import door

if __name__ == "__main__":
    door(["audit", *sys.argv[1:]])
