"""What the trainings of tokenizers have in common: what they refuse, tell and draw."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mimkit.config import SourceConfig, TokenizerConfig
from mimkit.errors import UserError
from mimkit.files import atomic_file
from mimkit.session import Session
from mimkit.tokenizers._dvae_health import TokenHealth, collapse_warning
from mimkit.train.pictures import picture_grid

_STEM_PATCH = 16  # pixels, of the encoder in configs/default.yaml


def refuse_what_does_nothing(config: TokenizerConfig, *, what: str, zero_3: str) -> None:
    """UserError for engine settings without effect, and for ZeRO stage 3.

    Args:
        what: is trained, with its article.
        zero_3: why not there.
    """
    if config.engine.zero_stage == 3:
        raise UserError(
            f"{zero_3}, which ZeRO stage 3 does not keep; set engine.zero_stage to 0, 1 or 2"
        )
    for name, off in (
        ("activation_checkpointing", False), ("compile", False), ("token_bank", None),
    ):  # fmt: skip
        if getattr(config.engine, name) != off:
            said = "false" if off is False else "null"
            raise UserError(f"engine.{name} does nothing for {what}; set it to {said}")


def refuse_other_sizes(config: TokenizerConfig, *, patch: int, whose: str) -> None:
    """UserError where a view does not divide into tokens."""
    if config.data.token_size % patch:
        raise UserError(
            f"data.token_size={config.data.token_size} is no multiple of {whose}{patch}, the "
            "pixels of one token"
        )


def words_in_use(health: TokenHealth) -> dict[str, float]:
    """For the metrics and the summary."""
    return {
        "codes_used": health.codes_used,
        "perplexity": health.perplexity,
        "unigram_entropy": health.entropy,
        "top_share": health.top_share,
    }


def warn_of_collapse(session: Session, updates: int, health: TokenHealth, *, remedy: str) -> None:
    """Says it and keeps it in the summary; takes an earlier warning back."""
    session.summary.pop("warning", None)
    warning = collapse_warning(health, remedy=remedy)
    if warning is not None and session.is_first:
        session.summary["warning"] = warning
        print(f"\nwarning at update {updates}: {warning}", flush=True)


def save_picture(session: Session, updates: int, columns: Mapping[str, Tensor]) -> None:
    """One column of images a name, into the run folder."""
    picture = picture_grid(list(columns.values()), tuple(columns))
    path = session.folder.path / "pictures" / f"step-{updates:08d}.png"
    with atomic_file(path) as temporary:
        picture.save(temporary, "PNG")


def use_in_words(summary: Mapping[str, Any], *, vocabulary: int, noun: str) -> str:
    """A sentence for the end of the training."""
    s = summary
    return (
        f"Tokens: {s['codes_used']} of {vocabulary} {noun} occur, perplexity "
        f"{s['perplexity']:.0f}, the most frequent one is {s['top_share']:.1%} of all."
    )


def what_next(
    config: TokenizerConfig, summary: Mapping[str, Any], path: Path, *, name: str, patch: int,
    remedy: str,
) -> str:  # fmt: skip
    """The last line of a training: the pretraining with it on the same images, at its own size.

    Args:
        name: of the tokenizer, whose file is in `path`; `patch` is in pixels of its view.
        remedy: for one that has collapsed, which nobody should pretrain with: "with ...".
    """
    if "warning" in summary:
        return f"Next: train it again {remedy}; as it is, pretraining with it would mean nothing"
    size = config.data.token_size
    words = [
        f"tokenizer={name}",
        f"tokenizer.path={path / 'tokenizer.safetensors'}",
        f"data.token_size={size}",
        f"data.image_size={size // patch * _STEM_PATCH}",
    ]
    given = config.data.model_dump(mode="json", include=set(SourceConfig.model_fields))
    usual = SourceConfig().model_dump(mode="json")
    words += [f"data.{key}={value if isinstance(value, str) else json.dumps(value)}"
              for key, value in given.items() if value != usual[key]]  # fmt: skip
    return f"Next: deepspeed tools/pretrain.py {shlex.join(words)}"


def where_it_is_from(fingerprint: str) -> str:
    """A paragraph of a card."""
    return (
        f"Fingerprint `{fingerprint}`: runs and token banks name it by that. In its run folder "
        "`config.yaml` has every setting, `run.json` the command and the data, `pictures/` what it "
        "redraws."
    )


def use_in_rows(summary: Mapping[str, Any], *, vocabulary: int, noun: str) -> str:
    """Rows of the table in a card."""
    s = summary
    return f"""| {noun}s that occur | {s["codes_used"]} of {vocabulary} |
| perplexity | {s["perplexity"]:.1f} |
| unigram entropy | {s["unigram_entropy"]:.4f} nats |
| share of the most frequent {noun} | {s["top_share"]:.4f} |"""
