"""Put a delta of a finetuning and the encoder it was made from together again.

  mimkit merge runs/finetune-001 runs/imagenette96-001 OUT

FINETUNED is the run folder, or its best/, of a run with output.delta=true, and INIT the encoder
that its init named. OUT becomes a folder with model.safetensors and head.safetensors, bit for bit
the weights that the run would have written without output.delta.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from mimkit.errors import UserError


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="mimkit merge", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("finetuned", type=Path, metavar="FINETUNED")
    parser.add_argument("init", type=Path, metavar="INIT")
    parser.add_argument("out", type=Path, metavar="OUT")
    args = parser.parse_args(argv)
    if args.out.exists():
        raise UserError(f"{args.out} exists; name another folder to write")
    from mimkit.classifier_io import merged, write_classifier
    from mimkit.encoder_io import load_encoder
    from mimkit.files import atomic_folder

    base = load_encoder(args.init).image_encoder.state_dict()
    classifier = merged(args.finetuned, base, base_name=str(args.init))
    with atomic_folder(args.out) as temporary:
        write_classifier(temporary, classifier, base=None)
    print(f'wrote {args.out}; use it: mimkit.load_encoder("{args.out}")')
    return 0
