"""What a finetuning starts from: the encoder, its head, and which of it trains."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from mimkit import build
from mimkit.classifier_io import finetuned_folder, read_head, weights_digest
from mimkit.config import FinetuneConfig, science_hash
from mimkit.data.class_labels import Classes
from mimkit.data.resize import sides
from mimkit.encoder_io import load_encoder, settings_of
from mimkit.errors import UserError
from mimkit.export._pretrained import Normalisation
from mimkit.models.classifier import ImageClassifier, check_classes, with_bias_per_block
from mimkit.models.encoder import ImageEncoder
from mimkit.models.geometric import resize_geometric
from mimkit.models.resize import resize_relative, resized
from mimkit.models.roles import trained_names
from mimkit.registry import code_digest
from mimkit.runs import LATEST, science_in

_RESIZE = {"bicubic": resize_relative, "geometric": resize_geometric}  # by model.resize

_GREY = Normalisation((0.5,) * 3, (0.5,) * 3)  # BEiT's, for an encoder from scratch


@dataclass
class Start:
    """The encoder as it is before anything is done to it; read in seconds, before the data.

    Attributes:
        weights: a copy of its own, None from scratch: what a delta is made against.
        head: of a finetuned model, else empty; `pooling` is that model's.
        pixels: what it was trained on.
        notes: what a person should know.
    """

    model: ImageEncoder
    weights: Mapping[str, Tensor] | None
    head: Mapping[str, Tensor]
    pooling: str | None
    pixels: Normalisation
    notes: list[str] = field(default_factory=list)

    def digest(self) -> str | None:
        """Of encoder and head, for the run folder."""
        return None if self.weights is None else weights_digest({**self.weights, **self.head})

    def code(self) -> dict[str, str]:
        """`code of init's stem` -> digest, where the encoder came with one of a user's own."""
        digest = code_digest(sys.modules[type(self.model.stem).__module__])
        return {} if self.weights is None or digest is None else {"code of init's stem": digest}


def settled(config: FinetuneConfig) -> FinetuneConfig:
    """`config` with the run that a link `latest` in `init` points at now.

    The link moves with every new run, this one too. Where it points at the run that this command
    has begun, that run's own `init` is meant: so the same command goes on.

    Raises:
        UserError: it points at another finetuning, or at nothing.
    """
    if config.init is None or (link := _latest_in(Path(config.init).expanduser())) is None:
        return config
    if not link.exists():
        raise UserError(f"init={config.init}: the link {link} points at {link.readlink()}, which "
                        "is not there; name a run folder")  # fmt: skip
    run, rest = link.parent / link.readlink(), Path(config.init).expanduser().relative_to(link)
    settings = settings_of(run) if (run / "config.yaml").exists() else {}
    same = config.model_copy(update={"init": settings.get("init", str(run / rest))})
    if "init" not in settings or science_in(run) == science_hash(same):
        return same
    raise UserError(
        f"init={config.init} points at {run} now, a finetuning that began with "
        f"init={same.init or 'null'}; name that to begin as it did, or init={run / rest} to go on "
        "from its best weights"
    )


def _latest_in(path: Path) -> Path | None:
    """The part of the path that ends in such a link."""
    return next((p for p in (path, *path.parents) if p.name == LATEST and p.is_symlink()), None)


def load_start(config: FinetuneConfig) -> Start:
    """Raises UserError where there is no such encoder, or it does not fit the images."""
    if config.init is None:
        start = Start(build.build_untrained(config), None, {}, None, _GREY)
    else:
        start = _read(Path(config.init).expanduser())
    if config.data.mean is not None and config.data.std is not None:
        given = Normalisation(config.data.mean, config.data.std)
        if start.weights is not None and given != start.pixels:
            start.notes.append(
                f"the encoder was trained with mean {start.pixels.mean} and std "
                f"{start.pixels.std}; data.mean and data.std say others"
            )
        start.pixels = given
    _fit(start, config)
    return start


def _read(path: Path) -> Start:
    if not path.exists():
        raise UserError(
            f"init={path} is not there; give the run folder of a pretraining, an exported encoder "
            "or published weights, or init=null to train from scratch"
        )
    folder = finetuned_folder(path)
    encoder = load_encoder(path)
    weights = {name: value.clone() for name, value in encoder.image_encoder.state_dict().items()}
    head = None if folder is None else read_head(folder)
    return Start(
        encoder.image_encoder,
        weights,
        {} if head is None else head.weights,
        None if head is None else head.pooling,
        encoder.normalisation,
    )


def _fit(start: Start, config: FinetuneConfig) -> None:
    """The encoder for the size of the images, with a bias of its own for each block."""
    old, new = start.model.encoder.grid, start.model.stem.grid(*sides(config.data.image_size))
    if old != new:
        start.notes.append(f"positions: {old[0]}x{old[1]} -> {new[0]}x{new[1]} patches")
    start.model = resized(start.model, new, relative=_RESIZE[config.model.resize])
    if config.model.per_block_bias and start.model.encoder.positions == "relative_shared":
        start.model = with_bias_per_block(start.model)
        start.notes.append("the shared relative bias was copied to every block")
    start.model.encoder.activation_checkpointing = config.engine.activation_checkpointing


def make_classifier(start: Start, config: FinetuneConfig, classes: Classes) -> ImageClassifier:
    """The model with its head, and requires_grad where it trains.

    Raises:
        UserError: the head that is taken over does not fit, or a role matches nothing.
    """
    model = ImageClassifier(start.model, num_classes=classes.num, pooling=config.model.pooling)
    model.initialise_head(seed=config.seed, scale=config.model.head_scale)
    if start.head and not config.model.fresh_head:
        _take_head(model, start, config, classes)
    elif config.train.freeze_head:
        raise UserError("train.freeze_head=true would leave the head as it was drawn: it is a "
                        "fresh one; set it to false")  # fmt: skip
    names = trained_names(model, config.train.roles, head=not config.train.freeze_head)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name in names
    model.still_stem = not {"all", "stem"} & set(config.train.roles)
    return model


def _take_head(
    model: ImageClassifier, start: Start, config: FinetuneConfig, classes: Classes
) -> None:
    if start.pooling != config.model.pooling:
        raise UserError(
            f"init={config.init} was finetuned with model.pooling={start.pooling}, not "
            f"{config.model.pooling}; set that, or model.fresh_head=true"
        )
    num = len(start.head["head.bias"])
    check_classes(num, classes=classes.num, where=str(config.init))
    model.load_state_dict({**model.state_dict(), **start.head})
    start.notes.append(f"the head of {num} classes was taken over from {config.init}")
