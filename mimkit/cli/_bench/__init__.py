"""`mimkit bench WHAT`: one file each, with `add_parser(subparsers)` and `run(arguments)`."""

import argparse
from typing import TypeAlias

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
