"""Configuration -> parts. The only reader of the configuration below the entry points."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

import numpy as np
import torch
from pydantic import BaseModel, TypeAdapter, ValidationError

from mimkit.batch import Grid
from mimkit.config import (
    ArchitectureConfig,
    Config,
    DataConfig,
    EngineConfig,
    FinetuneConfig,
    LabelledDataConfig,
    PartConfig,
    ShardSet,
    SourceConfig,
    TrainConfig,
)
from mimkit.contracts import check_mask, check_mask_at, check_stem, check_tokenizer, is_users_own
from mimkit.data.embedded import embedded_shards
from mimkit.data.labelled_views import AugmentedView, make_policy
from mimkit.data.mixture import Ingredient, MixtureSource, check_weights
from mimkit.data.resize import sides
from mimkit.data.selection import split_heldout, take, take_few
from mimkit.data.sources import SOURCES, Source
from mimkit.data.views import CenterView, TwoViews
from mimkit.downstream.probes import PROBES
from mimkit.errors import UserError
from mimkit.masks import MASKS, Mask, beits_share
from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.init import initialise
from mimkit.models.mask_at import MASK_AT, MaskAt
from mimkit.models.matmul import multiplies_bf16
from mimkit.models.mim import MaskedImageModel
from mimkit.models.sizes import SIZES
from mimkit.models.stems import STEMS, Stem
from mimkit.random import Purpose, generator
from mimkit.registry import Registry, nearest
from mimkit.tokenizers import TOKENIZERS, VisualTokenizer
from mimkit.train.schedule import cosine, warmup_cosine

Part = TypeVar("Part")


def make_part(registry: Registry[Callable[..., Part]], config: PartConfig, **given: Any) -> Part:
    """Calls the part with the settings of its section, and with what the program gives it.

    Raises:
        UserError: a setting that the part does not take, that is missing, or of the wrong type.
    """
    part, settings = _bind(registry, config, *given)
    taken = inspect.signature(part).parameters
    return part(**settings, **{name: given[name] for name in given if name in taken})


def _bind(
    registry: Registry[Callable[..., Part]], config: PartConfig, *given: str
) -> tuple[Callable[..., Part], dict[str, Any]]:
    """The part and its checked settings; `given` are arguments that the program adds."""
    part, section = registry.plug_in(config.name), registry.kind
    hints = _hints(part)
    parameters = inspect.signature(part).parameters
    free = {name: p for name, p in parameters.items() if name not in given}
    for key in config.settings:
        if key not in free:
            raise UserError(
                f"{section} '{config.name}' takes no setting '{key}'.{nearest(key, list(free))} "
                f"It takes: {', '.join(free) or 'none'}"
            )
    missing = [n for n, p in free.items() if p.default is p.empty and n not in config.settings]
    if missing:
        raise UserError(
            f"{section} '{config.name}' needs {section}.{f', {section}.'.join(missing)}"
        )
    settings = {
        key: _typed(value, hints.get(key, Any), f"{section}.{key}")
        for key, value in config.settings.items()
    }
    return part, settings


def _hints(part: Any) -> dict[str, Any]:
    return get_type_hints(part.__init__ if inspect.isclass(part) else part)


def _typed(value: Any, hint: Any, key: str) -> Any:
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise UserError(f"{key}: {problem} (given: {value!r})") from error


_KINDS: dict[str, Registry[Any]] = {
    "mask": MASKS, "stem": STEMS, "mask_at": MASK_AT, "tokenizer": TOKENIZERS, "teacher": TOKENIZERS
}  # fmt: skip


def code_digests(config: BaseModel) -> dict[str, str]:
    """`code of stems.py:Mine` -> digest, for each part that is a user's own; see `registry`.

    It decides numbers as settings do, and no setting says it.
    """
    named = {key: getattr(config, key, None) for key in _KINDS}
    found = {
        f"code of {part.name}": _KINDS[key].code_digest(part.name)
        for key, part in named.items() if isinstance(part, PartConfig)
    }  # fmt: skip
    return {name: digest for name, digest in found.items() if digest is not None}


def build_tokenizer(config: Config) -> VisualTokenizer:
    tokenizer = make_part(TOKENIZERS, config.tokenizer)
    if is_users_own(config.tokenizer.name):
        check_tokenizer(tokenizer, config.tokenizer.name)
    return tokenizer


def tokenizer_fingerprint(config: Config, tokenizer: VisualTokenizer) -> str:
    """Its own, and the digest of its code where that is a user's."""
    code = TOKENIZERS.code_digest(config.tokenizer.name)
    return tokenizer.fingerprint + ("" if code is None else f", code {code}")


def build_stem(config: Config) -> Stem:
    return _stem(config.stem, config.encoder)


def _stem(stem: PartConfig, encoder: ArchitectureConfig) -> Stem:
    width = SIZES[encoder.size].width
    return make_part(STEMS, stem, width=width, patch_size=encoder.patch_size)


def _sound_stem(stem: PartConfig, encoder: ArchitectureConfig) -> Stem:
    """One of a user's own keeps what `Stem` promises, or it is a UserError; without data (on the
    meta device) it cannot be tried."""
    made = _stem(stem, encoder)
    if is_users_own(stem.name) and torch.get_default_device().type != "meta":
        width = SIZES[encoder.size].width
        check_stem(made, stem.name, width=width, patch_size=encoder.patch_size)
    return made


def _encoder(settings: ArchitectureConfig, grid: Grid, engine: EngineConfig) -> Encoder:
    size = SIZES[settings.size]
    return Encoder(
        width=size.width,
        heads=size.heads,
        depth=settings.depth or size.depth,
        grid=grid,
        positions=settings.positions,
        layer_scale=settings.layer_scale,
        qkv_bias=settings.qkv_bias,
        branches=settings.branches,
        activation_checkpointing=engine.activation_checkpointing,
    )


def build_model(config: Config, *, prediction_dim: int) -> MaskedImageModel:
    """The model with its initial weights: a pure function of the configuration."""
    stem = _sound_stem(config.stem, config.encoder)
    mask_at = make_part(MASK_AT, config.mask_at)
    if is_users_own(config.mask_at.name) and torch.get_default_device().type != "meta":
        check_mask_at(mask_at, config.mask_at.name, stem=stem)
    model = MaskedImageModel(
        stem=stem,
        encoder=_encoder(
            config.encoder,
            stem.grid(config.data.image_size, config.data.image_size),
            config.engine,
        ),
        prediction_dim=prediction_dim,
        mask_at=mask_at,
    )
    initialise(model, seed=config.seed)
    return model


def build_untrained(config: FinetuneConfig) -> ImageEncoder:
    """The encoder of a training from scratch: a pure function of the configuration.

    Weights start as in BEiT's pretraining; DeiT's differ in that it does not shrink what deeper
    blocks add.
    """
    assert config.stem is not None and config.encoder is not None
    stem = _sound_stem(config.stem, config.encoder)
    grid = stem.grid(*sides(config.data.image_size))
    model = ImageEncoder(stem, _encoder(config.encoder, grid, config.engine))
    initialise(model, seed=config.seed)
    return model


def build_mask(config: Config, grid: Grid) -> Mask:
    settings = {"num_masked": beits_share(grid), **config.mask.settings}
    mask = make_part(MASKS, PartConfig(name=config.mask.name, **settings), grid=grid)
    if is_users_own(config.mask.name):
        check_mask(mask, config.mask.name, grid=grid)
    return mask


_DRAWS = 64  # masks that tell how much a placement hides


def hidden_share(mask: Mask, mask_at: MaskAt, stem: Stem) -> float:
    """Mean share of the patches that the encoder gets the mask token for.

    Raises:
        UserError: a mask leaves no patch visible; the encoder would see nothing of such an image.
    """
    rng = generator(Purpose.MASK, seed=0)
    mask_BN = torch.from_numpy(np.stack([mask(rng) for _ in range(_DRAWS)]))
    hidden_BN = mask_at.hidden(mask_BN, stem=stem, grid=mask.grid)
    if blind := int(hidden_BN.all(1).sum()):
        raise UserError(
            f"with mask.num_masked={mask.num_masked} of {mask.grid[0]}x{mask.grid[1]} patches and "
            f"a stem that sees {stem.reach} pixels beyond a patch, {blind} of {_DRAWS} masks leave "
            "no patch visible; set mask.num_masked lower, or mask_at to after_stem or before_stem"
        )
    return float(hidden_BN.float().mean())


def check_parts(config: Config) -> None:
    """UserError where a part does not exist, or not with these settings; reads no file."""
    with torch.device("meta"):
        stem = build_stem(config)
    mask = build_mask(config, stem.grid(config.data.image_size, config.data.image_size))
    hidden_share(mask, make_part(MASK_AT, config.mask_at), stem)
    _bind(TOKENIZERS, config.tokenizer)


def check_probe(config: PartConfig) -> None:
    """UserError where a probe does not exist, or not with these settings."""
    _bind(PROBES, config, "device", "seed")


def check_grids(config: Config, model: MaskedImageModel, tokenizer: VisualTokenizer) -> Grid:
    """The grid that stem and tokenizer agree on; the mask is made for it.

    Raises:
        UserError: they do not agree; names both, and the size that would.
    """
    image, token = config.data.image_size, config.data.token_size
    stem_grid, token_grid = model.stem.grid(image, image), tokenizer.grid(token, token)
    if stem_grid != token_grid:
        fit = stem_grid[0] * token // token_grid[0]
        raise UserError(
            f"the stem '{config.stem.name}' makes a {stem_grid[0]}x{stem_grid[1]} grid of "
            f"{image}-pixel views, but the tokenizer '{config.tokenizer.name}' makes "
            f"{token_grid[0]}x{token_grid[1]} of {token}-pixel views, and the mask "
            f"'{config.mask.name}' can only fit one; set data.token_size={fit}"
        )
    return stem_grid


Which = Literal["both", "patches", "tokens"]  # views that are rendered; the others stay empty


def build_views(data: DataConfig, which: Which = "both") -> TwoViews:
    return TwoViews(
        image_size=None if which == "tokens" else data.image_size,
        token_size=None if which == "patches" else data.token_size,
        jitter=data.jitter,
        crop_scale=data.crop_scale,
        crop_ratio=data.crop_ratio,
        flip=data.flip,
        image_interpolation=data.image_interpolation,
        token_interpolation=data.token_interpolation,
        exif=data.exif,
    )


def build_probe_view(data: DataConfig, which: Which = "both") -> CenterView:
    return CenterView(
        image_size=None if which == "tokens" else data.image_size,
        token_size=None if which == "patches" else data.token_size,
        image_interpolation=data.image_interpolation,
        token_interpolation=data.token_interpolation,
        exif=data.exif,
    )


def build_training_view(data: LabelledDataConfig, *, mean: Sequence[float]) -> AugmentedView:
    """A labelled view to train on; `mean` of the normalisation is what policies shift in."""
    height, width = sides(data.image_size)
    narrow, wide = data.crop_ratio  # of the view: 1 is the shape of `image_size`
    crop = TwoViews(
        image_size=(height, width),
        token_size=None,
        jitter=0.0,
        crop_scale=data.crop_scale,
        crop_ratio=(narrow * width / height, wide * width / height),
        flip=data.flip,
        image_interpolation=data.interpolation,
        exif=data.exif,
    )
    policy = None if data.augment is None else make_policy(
        data.augment, size=(height, width), mean=tuple(mean), interpolation=data.interpolation
    )  # fmt: skip
    return AugmentedView(crop=crop, policy=policy)


def build_judged_view(data: LabelledDataConfig) -> CenterView:
    """A labelled view to judge by."""
    return CenterView(
        image_size=sides(data.image_size),
        crop=data.test_crop,
        image_interpolation=data.interpolation,
        exif=data.exif,
    )


def check_splits(data: SourceConfig) -> None:
    """UserError where images of the user would be judged by the embedded ones, or the reverse."""
    if data.heldout is None or data.heldout_fraction is not None:
        return
    kinds = {shard_set.shards == "embedded" for shard_set in _sets(data)}
    if (data.heldout == "embedded") not in kinds:
        raise UserError(
            f"data.train={data.train} and data.heldout={data.heldout} are not of one kind: the "
            "held-out numbers would be about other images. Set data.heldout to shards of yours, or "
            "to null"
        )


def build_data(data: SourceConfig) -> tuple[Source, Source | None]:
    """What is trained on and what is held out.

    A part that is held out by fraction is taken first, so that no subset ever reaches into it.

    Raises:
        UserError: see the sources, `split_heldout`, `take` and `check_weights`.
    """
    train, heldout, taken_out = _build_train(data), None, None
    if data.heldout_fraction is not None:
        train, taken_out = split_heldout(train, fraction=data.heldout_fraction)
    elif data.heldout is not None:
        heldout = build_source(data, data.heldout, split="heldout")
    train = take(
        train,
        data.subset,
        stratified=data.stratified,
        seed=data.subset_seed,
        taken_out=taken_out,
    )
    check_weights(train)
    heldout = taken_out or heldout
    if heldout is not None and isinstance(data, LabelledDataConfig) and data.heldout_limit:
        heldout = take_few(heldout, data.heldout_limit)
    return train, heldout


def _sets(data: SourceConfig) -> list[ShardSet]:
    """`data.train`, whichever way it is written."""
    if isinstance(data.train, str):
        return [ShardSet(shards=data.train)]
    sets = [one for one in data.train if isinstance(one, ShardSet)]
    return sets or [ShardSet(shards=[one for one in data.train if isinstance(one, str)])]


def _build_train(data: SourceConfig) -> Source:
    sets = _sets(data)
    opened = [build_source(data, one.shards, split="train") for one in sets]
    if len(sets) == 1 and sets[0] == ShardSet(shards=sets[0].shards):
        return opened[0]
    return MixtureSource(
        [
            Ingredient(str(one.shards), source, one.weight, one.labels)
            for one, source in zip(sets, opened, strict=True)
        ]
    )


def build_source(data: SourceConfig, which: str | list[str], *, split: str) -> Source:
    """`embedded` is cut into the cache on first use; anything else is the user's."""
    cache = str(Path(data.cache_dir).expanduser())
    if which == "embedded":
        which = str(embedded_shards(Path(cache)) / f"{split}-*.tar")
    if data.source == "folder":
        if not isinstance(which, str):
            raise UserError(
                f"data.source=folder reads one folder, but {which} names {len(which)}; give a "
                "mapping for each in data.train, [{shards: FOLDER}, {shards: OTHER}]"
            )
        return SOURCES["folder"](folder=which)
    return SOURCES["shards"](shards=which, cache_dir=cache, cache_gib=data.cache_gib)


def open_test(data: LabelledDataConfig) -> Source | None:
    """What is looked at once, at the end."""
    return None if data.test is None else build_source(data, data.test, split="test")


def num_steps(train: TrainConfig, num_samples: int) -> int:
    if train.steps is not None:
        return train.steps
    assert train.epochs is not None
    return max(1, round(train.epochs * num_samples / train.batch_size))


def build_schedule(train: TrainConfig, steps: int) -> Callable[[int], float]:
    """Updates done -> learning rate."""
    warmup = round(train.warmup * steps)

    def learning_rate(updates: int) -> float:
        return warmup_cosine(updates, steps=steps, warmup=warmup, peak=train.lr, floor=train.min_lr)

    return learning_rate


def build_weight_decay(train: TrainConfig, steps: int) -> Callable[[int], float] | None:
    """Updates done -> weight decay of what decays; None where it is constant (DINO's rises)."""
    start, end = train.weight_decay, train.weight_decay_end
    if end is None:
        return None
    return lambda updates: cosine(updates / steps, start, end)


def use_bf16(engine: EngineConfig) -> bool:
    """auto: bf16 where the hardware multiplies it."""
    if engine.precision == "auto":
        return multiplies_bf16(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return engine.precision == "bf16"


def deepspeed_file(engine: EngineConfig) -> Path | None:
    """The user's DeepSpeed JSON; UserError where the chosen runtime would ignore a setting."""
    if engine.runtime != "deepspeed" and engine.zero_stage > 1:
        raise UserError(
            f"engine.zero_stage={engine.zero_stage} would be ignored by engine.runtime="
            f"{engine.runtime}, which keeps everything whole; set engine.runtime=deepspeed"
        )
    if engine.deepspeed_config is None:
        return None
    if engine.runtime != "deepspeed":
        raise UserError(
            f"engine.deepspeed_config={engine.deepspeed_config} would be ignored by "
            f"engine.runtime={engine.runtime}; set engine.runtime=deepspeed or "
            "engine.deepspeed_config=null"
        )
    return Path(engine.deepspeed_config).expanduser()
