"""Evaluate a finetuned model: `python tools/evaluate.py MODEL SHARDS`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mimkit.cli import door

if __name__ == "__main__":
    door(["evaluate", *sys.argv[1:]])
