"""The token banks of a run: bound to its data, views and tokenizer; filled, and opened for it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mimkit import build
from mimkit.batch import to_unit
from mimkit.config import Config
from mimkit.data.loader import OnBadSample, slot_loader
from mimkit.data.order import Order
from mimkit.data.sampler import Slot, first_samples
from mimkit.data.sources import Source
from mimkit.data.views import ViewMaker
from mimkit.errors import UserError
from mimkit.runs import versions
from mimkit.token_bank import BankWriter, Binding, TokenBank, make_binding
from mimkit.tokenizers import VisualTokenizer

_BATCH = 64  # images that are encoded together
_DECIDING = ("torch", "pillow", "simplejpeg", "numpy")  # packages that pixels and tokens come from


@dataclass(frozen=True)
class Half:
    """What a bank is needed for: the stream that is trained on, or the images it is judged by."""

    name: str  # of its folder
    source: Source
    view: ViewMaker
    seed: int
    on_bad_sample: OnBadSample
    binding: Binding
    rows: Callable[[int], list[int]]  # epoch -> the rows that are asked for, ascending


class Banks(NamedTuple):
    """Opened for a run; `heldout` is None where nothing is held out."""

    train: TokenBank
    heldout: TokenBank | None


def halves(
    config: Config, tokenizer: VisualTokenizer, train: Source, heldout: Source | None
) -> list[Half]:
    """What a run of this configuration reads, in the order in which it is made.

    Raises:
        UserError: the tokenizer has no words, or too many for 16 bits.
    """
    data = config.data
    order = Order(groups=train.groups, seed=config.seed, window=data.window, sets=train.sets)
    copies = max(part.copies + (part.num_extra > 0) for part in train.sets)
    seed = data.seed_of_views(config.seed)

    def rows_of(epoch: int) -> NDArray[np.int64]:
        """Of this seed, or, where seeds share their views, of any."""
        return np.sort(order.epoch_order(epoch)) if data.view_seed is None else order.every_row()

    names = ("jitter", "flip", "crop_scale", "crop_ratio", "on_bad_sample")
    drawn = {name: getattr(data, name) for name in names}
    if data.view_seed is not None and any(part.num_extra for part in train.sets):
        drawn["rows"] = "of every seed"  # one seed's own bank lacks some of them
    found = [
        Half("train", train, build.build_views(data, "tokens"), seed, data.on_bad_sample,
             _bind(config, tokenizer, train, rows=len(train) * copies, views=drawn),
             lambda epoch: rows_of(epoch).tolist()),
    ]  # fmt: skip
    if heldout is not None:
        judged = sorted(first_samples(heldout.sets, data.heldout_limit).tolist())
        found.append(
            Half("heldout", heldout, build.build_probe_view(data, "tokens"), seed, "raise",
                 _bind(config, tokenizer, heldout, rows=len(heldout),
                       views={"heldout_limit": data.heldout_limit}),
                 lambda epoch: judged)
        )  # fmt: skip
    return found


def _bind(
    config: Config, tokenizer: VisualTokenizer, source: Source, *, rows: int, views: dict[str, Any]
) -> Binding:
    data = config.data
    if tokenizer.vocabulary is None:
        raise UserError(
            f"tokenizer '{config.tokenizer.name}' has no words, and a token bank holds words only; "
            "train without engine.token_bank"
        )
    token_view = {"token_size": data.token_size, "exif": data.exif,
                  "token_interpolation": data.token_interpolation}  # fmt: skip
    found = versions()
    return make_binding(
        data=source.digest,
        num_samples=rows,
        tokenizer=build.tokenizer_fingerprint(config, tokenizer),
        vocabulary=tokenizer.vocabulary,
        grid=tokenizer.grid(data.token_size, data.token_size),
        seed=data.seed_of_views(config.seed),
        views={**token_view, **views},
        versions={name: found[name] for name in _DECIDING},
    )


def open_banks(
    config: Config,
    tokenizer: VisualTokenizer,
    train: Source,
    heldout: Source | None,
    *,
    steps: int,
) -> Banks:
    """The banks in `engine.token_bank`, checked against this run.

    Raises:
        UserError: they are of something else, incomplete or damaged, or hold too few epochs.
    """
    assert config.engine.token_bank is not None
    folder = Path(config.engine.token_bank).expanduser()
    needed = math.ceil(steps * config.train.batch_size / train.epoch_length)
    opened = []
    for half in halves(config, tokenizer, train, heldout):
        bank = TokenBank(folder / half.name, expected=half.binding)
        epochs = needed if half.name == "train" else 1
        if bank.epochs < epochs:
            raise UserError(
                f"{bank.folder} holds tokens of {bank.epochs} epochs, and this run needs {epochs}; "
                f"run tools/make_tokens.py again with --epochs {needed}, or train.steps lower"
            )
        opened.append(bank)
    return Banks(opened[0], opened[1] if heldout is not None else None)


def fill(
    half: Half,
    folder: Path,
    tokenizer: VisualTokenizer,
    *,
    epochs: int,
    device: torch.device,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    progress: Callable[[int], object] = lambda samples: None,
) -> None:
    """Computes what this rank of several has to of the first `epochs` epochs; goes on where it was.

    Args:
        progress: told the number of samples just computed.

    Raises:
        UserError: the folder is of something else; a sample cannot be read.
    """
    writer = BankWriter(folder / half.name, binding=half.binding)
    for epoch in range(epochs):
        needed = np.array(half.rows(epoch))
        jobs = [
            (part, rows, needed[(needed >= rows.start) & (needed < rows.stop)])
            for part, rows in writer.missing(epoch, rank=rank, world=world)
        ]
        stream = _encoded(half, [chosen for *_, chosen in jobs], epoch, tokenizer, device, workers)
        for part, rows, chosen in jobs:
            tokens_RN = np.zeros((len(rows), writer.num_tokens), np.uint16)
            for first in range(0, len(chosen), _BATCH):
                here = chosen[first : first + _BATCH]
                tokens_RN[here - rows.start] = next(stream)
                progress(len(here))
            writer.write(epoch, part, tokens_RN)
        writer.finish(epoch)


def _encoded(
    half: Half,
    parts: list[NDArray[np.int64]],
    epoch: int,
    tokenizer: VisualTokenizer,
    device: torch.device,
    workers: int,
) -> Iterator[NDArray[np.uint16]]:
    """Tokens of the rows of each part, a batch at a time; no batch spans two parts."""
    batches = [
        [_slot(epoch, int(row), len(half.source)) for row in rows[first : first + _BATCH]]
        for rows in parts
        for first in range(0, len(rows), _BATCH)
    ]
    if not batches:
        return
    loader = slot_loader(source=half.source, view=half.view, seed=half.seed, batches=batches,
                         workers=workers, on_bad_sample=half.on_bad_sample)  # fmt: skip
    for batch in loader:
        words_BN = tokenizer.encode(to_unit(batch.token_view_BChw.to(device)))
        yield words_BN.cpu().numpy().astype(np.uint16)


def _slot(epoch: int, row: int, num_samples: int) -> Slot:
    copy, sample = divmod(row, num_samples)
    return Slot(epoch, sample, copy)
