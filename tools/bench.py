"""How fast a part is on this machine: `python tools/bench.py data`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mimkit.cli import door

if __name__ == "__main__":
    door(["bench", *sys.argv[1:]])
