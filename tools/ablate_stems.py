"""Compare patch stems: `python tools/ablate_stems.py [--preset quick] [key=value ...]`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mimkit.cli import door

if __name__ == "__main__":
    door(["ablate_stems", *sys.argv[1:]])
