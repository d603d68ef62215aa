"""Compute tokens once: `[deepspeed] tools/make_tokens.py OUT [--config YAML] [key=value]`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mimkit.cli import door

if __name__ == "__main__":
    door(["make_tokens", *sys.argv[1:]])
