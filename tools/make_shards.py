"""Images or tars -> WebDataset shards with an index: `tools/make_shards.py SRC OUT`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mimkit.cli import door

if __name__ == "__main__":
    door(["make_shards", *sys.argv[1:]])
