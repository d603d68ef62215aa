"""`python -m mimkit` and `deepspeed --module mimkit`."""

import sys

from mimkit.cli import main

if __name__ == "__main__":
    # the deepspeed launcher puts --local_rank=N before everything else
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    sys.exit(main(words))
