"""Finetune an encoder on labelled images, or train a classifier from scratch.

  deepspeed tools/finetune.py init=runs/imagenette96-001 data.train=DIR/train-*.tar \\
      data.heldout=DIR/val-*.tar data.image_size=96
  deepspeed tools/finetune.py init=... train.roles=attention     only the attention, and the head
  deepspeed tools/finetune.py --config finetune_beit_base init=beit_base_patch16_224_pt22k.pth ...
  mimkit finetune ...                                  the same in one process, without a launcher
  deepspeed tools/finetune.py --estimate ...           time, memory and disk, out of a few steps

init is a run folder, an exported encoder, or a checkpoint that mimkit import_weights reads. The
best weights by held-out accuracy are kept in RUN/best, which mimkit.load_encoder opens; data.test
is looked at once, at the end. The same command continues a run that was interrupted. Recipes with
their sources: configs/finetune_*.yaml; all settings: --print-config.
"""

from collections.abc import Sequence

from mimkit.cli._arguments import command_time, find_config, parse, training_parser
from mimkit.cli._estimate import add_estimate, check_estimate, estimate
from mimkit.cli._schedule import add_plot_schedule, layer_scales, plot_schedule, warn_of_batch
from mimkit.config import load_finetune_config, to_yaml


def main(argv: Sequence[str]) -> int:
    parser = training_parser("finetune", __doc__ or "", "finetune_small")
    add_plot_schedule(parser)
    add_estimate(parser)
    arguments = parse(parser, argv)
    path = find_config(arguments.config)
    config = load_finetune_config(path, arguments.overrides)
    if arguments.print_config:
        print(to_yaml(config), end="")
        return 0
    if arguments.plot_schedule:
        scales = layer_scales(config.train.layer_decay)
        plot_schedule(config, arguments.plot_schedule, scales=scales)
        return 0
    warn_of_batch(path, config.train, arguments.overrides)
    check_estimate(arguments)
    from mimkit.finetuning import run  # after the configuration is known to be good: it is slow

    if arguments.estimate:
        return estimate(config, run, steps=arguments.estimate_steps)
    folder = run(config, started_at=command_time())
    if folder.finished:
        print(f"{folder.path} is finished already (its summary.json has the numbers); choose "
              "another output.dir to train again")  # fmt: skip
    return 0
