"""Export an encoder: `python tools/export.py RUN --format timm OUT`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mimkit.cli import door

if __name__ == "__main__":
    door(["export", *sys.argv[1:]])
