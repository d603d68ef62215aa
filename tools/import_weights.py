"""Import an encoder of others: `python tools/import_weights.py FILE OUT`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mimkit.cli import door

if __name__ == "__main__":
    door(["import_weights", *sys.argv[1:]])
