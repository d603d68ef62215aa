"""Pretrain an encoder by masked image modelling.

  deepspeed tools/pretrain.py                          the main job on an embedded data set
  deepspeed tools/pretrain.py stem=linear train.steps=100
  deepspeed tools/pretrain.py --config imagenette96 data.train=DIR/train-*.tar data.heldout=...
  mimkit pretrain                                      the same in one process, without a launcher

The same command continues a run that was interrupted. Settings and their defaults: --print-config.
"""

from collections.abc import Sequence

from mimkit.cli._arguments import command_time, find_config, parse, training_parser
from mimkit.config import load_config, to_yaml


def main(argv: Sequence[str]) -> int:
    arguments = parse(training_parser("pretrain", __doc__ or "", "default"), argv)
    config = load_config(find_config(arguments.config), arguments.overrides)
    if arguments.print_config:
        from mimkit.build import check_parts

        check_parts(config)
        print(to_yaml(config), end="")
        return 0
    from mimkit.pretraining import run  # after the configuration is known to be good: it is slow

    folder = run(config, started_at=command_time())
    if folder.finished:
        print(f"{folder.path} is finished already (its summary.json has the numbers); choose "
              "another output.dir to train again")  # fmt: skip
    return 0
