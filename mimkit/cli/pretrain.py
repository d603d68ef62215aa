"""Pretrain an encoder by masked image modelling.

  deepspeed tools/pretrain.py                          the main job on an embedded data set
  deepspeed tools/pretrain.py stem=linear train.steps=100
  deepspeed tools/pretrain.py --config imagenette96 data.train=DIR/train-*.tar data.heldout=...
  mimkit pretrain                                      the same in one process, without a launcher
  mimkit pretrain --plot-schedule schedule.png         learning rate and weight decay, no training
  deepspeed tools/pretrain.py --estimate               time, memory and disk, out of a few steps

The same command continues a run that was interrupted. Settings and their defaults: --print-config.
"""

from collections.abc import Sequence

from mimkit.cli._arguments import command_time, find_config, parse, training_parser
from mimkit.cli._estimate import add_estimate, check_estimate, estimate
from mimkit.cli._schedule import add_plot_schedule, plot_schedule, warn_of_batch
from mimkit.config import load_config, to_yaml


def main(argv: Sequence[str]) -> int:
    parser = training_parser("pretrain", __doc__ or "", "default")
    add_plot_schedule(parser)
    add_estimate(parser)
    arguments = parse(parser, argv)
    path = find_config(arguments.config)
    config = load_config(path, arguments.overrides)
    if arguments.print_config:
        from mimkit.build import check_parts

        check_parts(config)
        print(to_yaml(config), end="")
        return 0
    if arguments.plot_schedule:
        plot_schedule(config, arguments.plot_schedule)
        return 0
    warn_of_batch(path, config.train, arguments.overrides)
    check_estimate(arguments)
    from mimkit.pretraining import run  # after the configuration is known to be good: it is slow

    if arguments.estimate:
        return estimate(config, run, steps=arguments.estimate_steps)
    folder = run(config, started_at=command_time())
    if folder.finished:
        print(f"{folder.path} is finished already (its summary.json has the numbers); choose "
              "another output.dir to train again")  # fmt: skip
    return 0
