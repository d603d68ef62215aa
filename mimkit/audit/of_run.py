"""The audits at the start of a pretraining: into its folder and summary, and some lines."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from PIL import Image

from mimkit import build
from mimkit.audit import leak, tokenizer_verdict
from mimkit.audit._tokenizer_picture import tokenizer_picture
from mimkit.audit.leak import Leak
from mimkit.audit.tokenizer import TokenizerHealth, measure
from mimkit.audit.tokenizer_verdict import stop_if_dead
from mimkit.batch import Batch
from mimkit.config import DataConfig
from mimkit.data.loader import train_loader
from mimkit.data.sources import Source
from mimkit.files import atomic_file, write_text
from mimkit.tokenizers import VisualTokenizer

_BATCH = 16
_IMAGES = 32  # of the short form: each is encoded six times, 1 s in all in the default job
_SHOWN = 8


def training_views(source: Source, data: DataConfig, *, seed: int, images: int) -> list[Batch]:
    """The first `images` pairs of views that a training with this seed sees; masks are empty."""
    loader = train_loader(
        source=source,
        views=build.build_views(data),
        mask=None,
        seed=seed,
        view_seed=data.view_seed,
        batch_size=min(_BATCH, images),
        rank=0,
        world=1,
        position=0,
        window=data.window,
        workers=0,
        on_bad_sample=data.on_bad_sample,
    )
    return list(_first(iter(loader), images))


def _first(batches: Iterator[Batch], images: int) -> Iterator[Batch]:
    for batch in islice(batches, -(-images // _BATCH)):
        yield Batch(*(field[:images] for field in batch))
        images -= len(batch.index_B)


@dataclass(frozen=True)
class TokenizerAudit:
    health: TokenizerHealth
    picture: Image.Image


def audit_tokenizer(
    tokenizer: VisualTokenizer,
    source: Source,
    data: DataConfig,
    *,
    name: str,
    seed: int,
    device: torch.device,
) -> TokenizerAudit:
    """The short form, on the first training views.

    Raises:
        UserError: the targets are as good as constant, or not finite; a sample cannot be read.
    """
    views = training_views(source, data, seed=seed, images=_IMAGES)
    health = measure(tokenizer, views, name=name, device=device)
    stop_if_dead(health)
    shown = views[0].token_view_BChw[:_SHOWN]
    return TokenizerAudit(health, tokenizer_picture(tokenizer, shown, device=device))


@dataclass(frozen=True)
class RunAudits:
    """The tokenizer's is rank 0's."""

    leaks: list[Leak]
    tokenizer: TokenizerAudit | None

    def numbers(self) -> dict[str, float]:
        """What goes into the summary of the run, by the names it has there."""
        found = tokenizer_verdict.numbers(self.tokenizer.health) if self.tokenizer else {}
        for one in self.leaks:
            found |= {
                f"leak_{one.mode}_visible_moved": one.visible_moved,
                f"leak_{one.mode}_mean_relative": one.mean_relative,
                f"leak_{one.mode}_max_relative": one.max_relative,
            }
        return found

    def say(self) -> str:
        """Some lines for a person."""
        said = [tokenizer_verdict.say(self.tokenizer.health)] if self.tokenizer else []
        said += [leak.say(self.leaks)] if self.leaks else []
        return "\n".join(said)

    def save(self, folder: Path) -> None:
        """`leak.json`, `tokenizer.json` and `tokenizer.png`."""
        if self.leaks:
            leaks = json.dumps([asdict(one) for one in self.leaks], indent=1)
            write_text(folder / "leak.json", leaks)
        if self.tokenizer is not None:
            health = json.dumps(asdict(self.tokenizer.health), indent=1)
            write_text(folder / "tokenizer.json", health)
            with atomic_file(folder / "tokenizer.png") as temporary:
                self.tokenizer.picture.save(temporary, "PNG")
