"""`python -m mimkit` and `deepspeed --module mimkit`."""

import sys

from mimkit.cli import door

if __name__ == "__main__":
    # the deepspeed launcher puts --local_rank=N before everything else
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    door(words)
