"""Probe an encoder: `python tools/probe.py ENCODER --train SHARDS --test SHARDS`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mimkit.cli import door

if __name__ == "__main__":
    door(["probe", *sys.argv[1:]])
