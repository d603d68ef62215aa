"""Typed configuration: YAML files with a base, overrides `key=value`, and no key that goes unread.

Sections are promises. `output` and `engine` never change what is computed, save `engine.precision`
(and the float rounding that comes with another number of ranks); everything else is the science of
the run, and a run folder is only continued when the science is the same.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from mimkit.errors import UserError
from mimkit.registry import nearest
from mimkit.resources import shipped_config

Settings = dict[str, Any]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
RunName = Annotated[str, Field(pattern=r"^[\w.-]+$")]  # a part of the run folder's name


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PartConfig(Section):
    """Which part, by its file's name; the other keys are that part's own arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def settings(self) -> Settings:
        return dict(self.model_extra or {})


class ShardSet(Section):
    """One of several sets in `data.train`; an epoch has each of its samples `weight` times."""

    shards: str | list[str]
    weight: float = Field(1.0, gt=0)  # 2.3: twice, and 30 % once more, others in every epoch
    labels: bool = True  # false: as if it had none


def _form(train: Any) -> str:
    """Which of the three forms of `data.train` is meant, so that errors are about that one."""
    if not isinstance(train, list):
        return "<one>"
    return "<sets>" if any(isinstance(one, dict | ShardSet) for one in train) else "<patterns>"


Train = Annotated[
    Annotated[str, Tag("<one>")]
    | Annotated[list[str], Tag("<patterns>")]
    | Annotated[list[ShardSet], Tag("<sets>")],
    Discriminator(_form),
]


class DataConfig(Section):
    """Where images come from and how a view is cut (BEiT's transform, facts in README)."""

    train: Train = "embedded"  # a pattern, patterns of one set, or sets with weights
    heldout: str | list[str] | None = "embedded"
    heldout_fraction: float | None = Field(None, gt=0, lt=1)  # held out of `train`, by hash of key
    subset: float | str | None = None  # share of `train`, or a text file with one key a line
    stratified: bool = False  # the share of every class
    subset_seed: Seed = 0  # not the run's: the seeds of a study share their images
    source: Literal["shards", "folder"] = "shards"
    cache_dir: str = "~/.cache/mimkit"
    cache_gib: float | None = Field(64.0, gt=0)  # of shards from servers; null: what the disk has
    window: int = Field(8, ge=1)  # shards that are shuffled together
    image_size: int = Field(224, ge=8)  # pixels, the encoder's view
    token_size: int = Field(112, ge=8)  # pixels, the tokenizer's view
    image_interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    token_interpolation: Literal["lanczos", "bicubic", "bilinear"] = "lanczos"
    jitter: float = Field(0.4, ge=0, lt=1)  # brightness, contrast, saturation
    flip: float = Field(0.5, ge=0, le=1)
    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    exif: Literal["ignore", "honour"] = "ignore"  # BEiT ignores the orientation tag
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[Positive, Positive, Positive] = (0.5, 0.5, 0.5)
    on_bad_sample: Literal["raise", "substitute"] = "raise"  # substitutes are counted and said
    max_bad_samples: float = Field(0.001, ge=0, le=1)  # of those drawn; more, and over ten, stops
    heldout_limit: int = Field(2048, ge=1)  # images of the held-out loss

    @field_validator("subset", mode="before")
    @classmethod
    def _share_or_path(cls, subset: Any) -> Any:
        """1e-2 is text in YAML 1.1."""
        try:
            return subset if subset is None else float(subset)
        except (TypeError, ValueError):
            return subset

    @model_validator(mode="after")
    def _one_choice(self) -> "DataConfig":
        if self.heldout_fraction is not None and self.heldout not in (None, "embedded"):
            raise ValueError(f"data.heldout_fraction={self.heldout_fraction:g} holds images of "
                             f"data.train out, but data.heldout={self.heldout} names others; set "
                             "one of them to null")  # fmt: skip
        if isinstance(self.subset, float) and not 0 < self.subset <= 1:
            raise ValueError(f"data.subset is {self.subset:g}; expected a share of the images in "
                             "(0, 1], or a text file with one key a line")  # fmt: skip
        for name in ("stratified", "subset_seed"):
            if getattr(self, name) and not isinstance(self.subset, float):
                raise ValueError(f"data.{name} does nothing where data.subset is not a fraction; "
                                 "leave it out")  # fmt: skip
        return self

    @model_validator(mode="after")
    def _ordered_ranges(self) -> "DataConfig":
        for name, (low, high), most in (("crop_scale", self.crop_scale, 1.0),
                                        ("crop_ratio", self.crop_ratio, float("inf"))):  # fmt: skip
            if not 0 < low <= high <= most:
                raise ValueError(f"{name} is [{low:g}, {high:g}]; expected 0 < smallest <= largest"
                                 + (f" <= {most:g}" if name == "crop_scale" else ""))  # fmt: skip
        return self


SizeName = Literal["Ti", "S", "B", "L", "H"]
_SIZE = re.compile(rf"({'|'.join(get_args(SizeName))})(?:([1-9][0-9]*)(?:x([1-9][0-9]*))?)?")


class EncoderConfig(Section):
    """`size: B18x2` is short for size B, depth 18, branches 2; S36 for one branch (P, section 3).

    In whichever file or on the command line it stands, a name means the same as the three written
    out there: it replaces a base's depth and branches, and what comes later replaces its own. A
    bare letter says nothing about depth and branches.
    """

    size: SizeName = "B"
    depth: int | None = Field(None, ge=1)  # None: the size's own
    patch_size: int = Field(16, ge=1)
    positions: Literal["absolute", "relative", "relative_shared", "none"] = "absolute"
    layer_scale: float | None = 0.1  # BEiT: 0.1 for B, 1e-5 for L; None is without
    drop_path: float = Field(0.1, ge=0, lt=1)
    qkv_bias: Literal["qv", "qkv"] = "qv"  # BEiT has no key bias
    branches: int = Field(1, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _written_out(cls, settings: Any) -> Any:
        return _write_out_size(settings) if isinstance(settings, dict) else settings


def _write_out_size(encoder: Settings) -> Settings:
    name = encoder.get("size")
    if not isinstance(name, str):
        return encoder
    found = _SIZE.fullmatch(name)
    if found is None:
        raise UserError(
            f"encoder.size is '{name}'; expected one of {', '.join(get_args(SizeName))}, alone or "
            "with a depth (S36), or with a depth and branches (B18x2: 18 blocks of 2 branches)"
        )
    letter, depth, branches = found.groups()
    if depth is None:
        return encoder
    named = {"depth": int(depth), "branches": int(branches or 1)}
    for key, value in named.items():
        if encoder.get(key) not in (None, value):
            raise UserError(
                f"encoder.size={name} means encoder.{key}={value}, but encoder.{key} is "
                f"{encoder[key]}; leave encoder.{key} out, or set encoder.size={letter}"
            )
    return {**encoder, "size": letter, **named}


class TrainConfig(Section):
    """The optimisation; defaults are BEiT's at a global batch of 2048."""

    steps: int | None = Field(None, ge=1)
    epochs: float | None = Field(None, gt=0)
    batch_size: int = Field(2048, ge=1)  # global: over all ranks and accumulated micro-batches
    lr: float = Field(1.5e-3, gt=0)
    min_lr: float = Field(1e-5, ge=0)
    warmup: float = Field(0.0125, ge=0, lt=1)  # share of the run; BEiT: 10 of 800 epochs
    weight_decay: float = Field(0.05, ge=0)
    betas: tuple[Share, Share] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(3.0, ge=0)  # 0: off

    @model_validator(mode="after")
    def _one_length(self) -> "TrainConfig":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of train.steps and train.epochs, null for the other")
        return self


class ProbeConfig(Section):
    """kNN on frozen features at the end of a run."""

    neighbours: int = Field(20, ge=1)
    pooling: Literal["mean", "cls"] = "mean"
    depth: float = Field(1.0, gt=0, le=1)  # share of the blocks to go through; 1: and the last norm
    train_limit: int = Field(5000, ge=1)
    heldout_limit: int = Field(5000, ge=1)


class EngineConfig(Section):
    runtime: Literal["deepspeed", "local"] = "deepspeed"
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 where the hardware has it
    zero_stage: int = Field(1, ge=0, le=3)
    deepspeed_config: str | None = None  # your own JSON; a contradiction stops the run
    accumulation: int = Field(1, ge=1)  # micro-batches per optimizer step
    workers: int | None = Field(None, ge=0)  # loader processes a rank; None: chosen from the cores
    threads: int | None = Field(None, ge=1)  # torch threads a rank; None: cores / local ranks
    activation_checkpointing: bool = False
    token_bank: str | None = None  # folder that tools/make_tokens.py filled; changes no loss


class OutputConfig(Section):
    runs_dir: str = "runs"
    dir: str | None = None  # None: runs_dir/NAME-NNN, or the unfinished run of this configuration
    log_every: int = Field(10, ge=1)
    checkpoint_every: int = Field(1000, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    evaluate_every: int = Field(1000, ge=1)
    picture_every: int = Field(1000, ge=1)
    tensorboard: bool = True


class Config(Section):
    name: RunName = "pretrain"
    seed: Seed = 0
    data: DataConfig = DataConfig()
    mask: PartConfig = PartConfig(name="blockwise")
    stem: PartConfig = PartConfig(name="hmlp")
    mask_at: PartConfig = PartConfig(name="after_stem")  # or before_stem, dilated
    encoder: EncoderConfig = EncoderConfig()
    tokenizer: PartConfig = PartConfig(name="dvae")
    train: TrainConfig
    probe: ProbeConfig = ProbeConfig()
    engine: EngineConfig = EngineConfig()
    output: OutputConfig = OutputConfig()


class TokenizerConfig(Section):
    """What `tools/train_tokenizer.py` reads, whichever tokenizer it trains."""

    name: RunName = "tokenizer"
    seed: Seed = 0
    data: DataConfig = DataConfig()
    train: TrainConfig
    engine: EngineConfig = EngineConfig()
    output: OutputConfig = OutputConfig()

    @model_validator(mode="after")
    def _one_view(self) -> "TokenizerConfig":
        """What concerns the encoder's view would be without effect."""
        for name in ("image_size", "image_interpolation", "mean", "std"):
            if getattr(self.data, name) != DataConfig.model_fields[name].default:
                raise ValueError(f"data.{name} does nothing here: a tokenizer sees token views "
                                 "only; leave it out, and set data.token_size")  # fmt: skip
        return self


class DvaeModelConfig(Section):
    """The DALL-E dVAE's architecture at another size (its own: width 256, 2 blocks, 8192 words)."""

    width: int = Field(256, ge=4)
    blocks: int = Field(2, ge=1)
    vocabulary: int = Field(8192, ge=2)


class DvaeObjectiveConfig(Section):
    """Schedules are cosines over a share of the run (DALL-E A.2: tau 5 %, KL 0.17 % of it).

    `balance` and `spread` are ours: a small dVAE in a short run collapses to a few words without
    them. Balance [0, 0] and spread null are the paper's objective.
    """

    temperature: tuple[float, float] = (1.0, 1 / 16)
    temperature_share: float = Field(0.75, gt=0, le=1)
    kl_weight: float = Field(6.6, ge=0)
    kl_share: float = Field(0.1, gt=0, le=1)
    balance: tuple[float, float] = (0.0, 0.0)  # weight on uneven use of words, first and last
    balance_share: float = Field(0.5, gt=0, le=1)
    spread: float | None = Field(None, gt=0)  # deviation of each word's first logits
    ema: float = Field(0.999, ge=0, lt=1)


class DvaeConfig(TokenizerConfig):
    model: DvaeModelConfig = DvaeModelConfig()
    objective: DvaeObjectiveConfig = DvaeObjectiveConfig()


class VqkdModelConfig(Section):
    """BEiT v2's is of size B, with 3 (or 1) blocks in the decoder."""

    size: SizeName = "B"
    depth: int | None = Field(None, ge=1)  # None: the size's own
    decoder_depth: int = Field(3, ge=1)
    patch_size: int = Field(16, ge=1)
    vocabulary: int = Field(8192, ge=2)
    code_dim: int = Field(32, ge=1)


class VqkdObjectiveConfig(Section):
    """`revive` is ours: BEiT v2 leaves dead codes dead, which is 0."""

    commitment: float = Field(1.0, ge=0)  # weight of the tokens' distance from their codes
    decay: float = Field(0.99, ge=0, lt=1)  # of the codebook's running average
    revive: float = Field(0.1, ge=0, lt=1)  # of an equal share of the tokens; a code below is dead


class VqkdConfig(TokenizerConfig):
    """Chosen by its section `teacher`: a tokenizer whose targets are numbers, BEiT v2's VQ-KD."""

    teacher: PartConfig
    model: VqkdModelConfig = VqkdModelConfig()
    objective: VqkdObjectiveConfig = VqkdObjectiveConfig()


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]  # type: ignore[no-untyped-call]
        twice = {str(key) for key in keys if keys.count(key) > 1}
        if twice:
            where = f"{node.start_mark.name}, line {node.start_mark.line + 1}"
            raise UserError(f"{where}: given twice: {', '.join(sorted(twice))}")
        return super().construct_mapping(node, deep)


def _parse(text: str, origin: str) -> Any:
    loader = _StrictLoader(text)
    loader.name = origin  # what messages say in front of the line
    try:
        return loader.get_single_data()
    except yaml.YAMLError as error:
        raise UserError(f"{origin} is not valid YAML: {error}") from error


def _merge(old: Settings, new: Settings) -> Settings:
    """`new` over `old`, section by section; a part with another name keeps nothing of the old."""
    merged = dict(old)
    for key, value in new.items():
        before = merged.get(key)
        merged[key] = value
        if isinstance(before, dict) and isinstance(value, dict):
            same_part = value.get("name", before.get("name")) == before.get("name")
            merged[key] = _merge(before, value) if same_part else value
    return merged


def _read_file(path: Path, seen: tuple[Path, ...] = ()) -> Settings:
    path = path.resolve()
    if path in seen:
        raise UserError(f"{path} names itself as its base, by way of {seen[-1]}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"cannot read the configuration {path}: {reason}") from error
    found = _parse(text, str(path))
    if not isinstance(found, dict):
        raise UserError(f"{path} holds {type(found).__name__}, expected `key: value` lines")
    found = _write_out(found, str(path))
    base = found.pop("base", None)
    return _merge(_read_file(_base(path, str(base)), (*seen, path)), found) if base else found


def _write_out(settings: Settings, origin: str) -> Settings:
    """One file, or the command line, before it is merged: the later of a name and a depth wins."""
    encoder = settings.get("encoder")
    if not isinstance(encoder, dict):
        return settings
    try:
        return {**settings, "encoder": _write_out_size(encoder)}
    except UserError as error:
        raise UserError(f"{origin}: {error}") from error


def _base(path: Path, name: str) -> Path:
    """Beside the file that names it, or one of the shipped ones, with or without `.yaml`."""
    beside = path.parent / name
    return beside if beside.exists() else shipped_config(name) or beside


_PARTS = ("mask", "mask_at", "stem", "teacher", "tokenizer")


def _override(text: str) -> Settings:
    """`train.lr=1e-3` -> {"train": {"lr": "1e-3"}}; `stem=linear` is short for stem.name=linear."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"'{text}' is not an override; write key=value, for example train.lr=1e-3")
    if key in _PARTS and not value.startswith("{"):
        key += ".name"
    # a glob that begins with * would be a YAML alias
    settings: Any = value if value.startswith("*") else _parse(value, f"the value of {key}")
    for word in reversed(key.split(".")):
        settings = {word: settings}
    assert isinstance(settings, dict)
    return settings


def _merge_overrides(overrides: Sequence[str]) -> Settings:
    settings: Settings = {}
    keys = [text.partition("=")[0] for text in overrides]
    for key, following in itertools.pairwise(keys):
        if key == following:  # further apart, the last one wins: a script adds to its defaults
            raise UserError(
                f"{key} is given twice in a row; give it once. A shell makes several words of "
                f"braces: quote them, '{key}=train-{{000..012}}.tar'"
            )
    for text in overrides:
        settings = _deep_update(settings, _override(text))
    return settings


def _deep_update(old: Settings, new: Settings) -> Settings:
    both = {
        k: _deep_update(old[k], v) if isinstance(v, dict) and isinstance(old.get(k), dict) else v
        for k, v in new.items()
    }
    return {**old, **both}


def _known_keys(kind: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in kind.model_fields.items():
        keys.append(prefix + name)
        for section in _sections(field.annotation):
            keys += _known_keys(section, f"{prefix}{name}.")
    return keys


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """Of a field's type; of a union of lists, those in the lists too."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)


def _explain(error: ValidationError, kind: type[BaseModel], origin: str) -> str:
    lines = []
    for problem in error.errors():
        words = [word for word in problem["loc"] if isinstance(word, str)]
        key = ".".join(word for word in words if not word.startswith("<"))  # a form, see `_form`
        if problem["type"] == "extra_forbidden":
            hint = nearest(key, _known_keys(kind))
            lines.append(f"there is no setting '{key}'.{hint}")
        else:
            given = (
                ""
                if problem["type"] in ("missing", "value_error")
                else f" (given: {problem['input']!r})"
            )
            where = f"{key}: " if key else ""
            lines.append(f"{where}{problem['msg'].removeprefix('Value error, ')}{given}")
    return f"{origin}: " + "; ".join(dict.fromkeys(lines))


def _load(kind: type[Any], path: Path, overrides: Sequence[str]) -> Any:
    given = _write_out(_merge_overrides(overrides), " ".join(overrides))
    settings = _merge(_read_file(path), given)
    if kind is Config and settings.keys() & {"objective", "teacher"}:
        raise UserError(
            f"{path} is the configuration of a tokenizer's training; give it to "
            "tools/train_tokenizer.py, or give pretraining's"
        )
    for part in _PARTS if kind is Config else ():  # mask_at.filler=mean is about the default part
        if isinstance(section := settings.get(part), dict):
            section.setdefault("name", Config.model_fields[part].default.name)
    if kind is TokenizerConfig:
        kind = VqkdConfig if "teacher" in settings else DvaeConfig
    origin = " ".join([str(path), *overrides])
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        raise UserError(_explain(error, kind, origin)) from error


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """A pretraining configuration; UserError names every key that is unknown or out of range."""
    config: Config = _load(Config, path, overrides)
    return config


def load_tokenizer_config(path: Path, overrides: Sequence[str] = ()) -> DvaeConfig | VqkdConfig:
    """The configuration of a tokenizer's training: one with a section `teacher` is a VQ-KD's."""
    config: DvaeConfig | VqkdConfig = _load(TokenizerConfig, path, overrides)
    return config


def to_yaml(config: BaseModel) -> str:
    """The resolved configuration as YAML that loads back to the same."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def science_of(config: BaseModel) -> Settings:
    """What decides the numbers: all but `output` and `engine` (whose precision stays).

    Nor where files are cached, nor how many bad samples stop a run: it goes on with more.
    """
    settings = config.model_dump(mode="json")
    settings.pop("output")
    settings["engine"] = {"precision": settings["engine"]["precision"]}
    for key in ("cache_dir", "cache_gib", "max_bad_samples"):
        settings["data"].pop(key)
    return settings


def science_hash(config: BaseModel) -> str:
    return hashlib.sha256(json.dumps(science_of(config), sort_keys=True).encode()).hexdigest()[:16]


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`key: old -> new` for every leaf that differs."""
    lines: list[str] = []
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {before!r} -> {after!r}")
    return lines
