"""DALL-E's weights -> safetensors: `tools/convert_dalle.py encoder.pkl OUT.safetensors`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mimkit.cli import door

if __name__ == "__main__":
    door(["convert_dalle", *sys.argv[1:]])
