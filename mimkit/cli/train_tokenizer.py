"""Train a tokenizer whose tokens an encoder can be pretrained to predict: a dVAE, or a VQ-KD.

  deepspeed tools/train_tokenizer.py                   on the embedded photographs
  deepspeed tools/train_tokenizer.py data.train=DIR data.heldout=OTHER model.vocabulary=1024
  deepspeed tools/train_tokenizer.py --config vqkd teacher.path=encoder.safetensors

The run folder gets tokenizer.safetensors, its card and pictures.
"""

from collections.abc import Sequence

from mimkit.cli._arguments import command_time, find_config, parse, training_parser
from mimkit.cli._schedule import add_plot_schedule, plot_schedule, warn_of_batch
from mimkit.config import VqkdConfig, load_tokenizer_config, to_yaml


def main(argv: Sequence[str]) -> int:
    parser = training_parser("train_tokenizer", __doc__ or "", "tokenizer")
    add_plot_schedule(parser)
    arguments = parse(parser, argv)
    path = find_config(arguments.config)
    config = load_tokenizer_config(path, arguments.overrides)
    if arguments.print_config:
        print(to_yaml(config), end="")
        return 0
    if arguments.plot_schedule:
        plot_schedule(config, arguments.plot_schedule)
        return 0
    warn_of_batch(path, config.train, arguments.overrides)
    from mimkit import tokenizer_training, vqkd_training

    started_at = command_time()
    if isinstance(config, VqkdConfig):
        folder = vqkd_training.run(config, started_at=started_at)
    else:
        folder = tokenizer_training.run(config, started_at=started_at)
    if folder.finished:
        print(f"{folder.path} is finished already; choose another output.dir to train again")
    return 0
