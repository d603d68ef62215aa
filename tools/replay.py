"""Repeat the update in which a run went wrong: `python tools/replay.py RUN/flight/update-...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mimkit.cli import door

if __name__ == "__main__":
    door(["replay", *sys.argv[1:]])
