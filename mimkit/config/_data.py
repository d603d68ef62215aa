"""Where images come from and how their views are cut."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator
from typing_extensions import Self

from mimkit.config._section import Positive, Section, Seed


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


class SourceConfig(Section):
    """Where images come from, whatever is done with them."""

    train: Train = "embedded"  # a pattern, patterns of one set, or sets with weights
    heldout: str | list[str] | None = "embedded"
    heldout_fraction: float | None = Field(None, gt=0, lt=1)  # held out of `train`, by hash of key
    subset: float | str | None = None  # share of `train`, or a text file with one key a line
    stratified: bool = False  # the share of every class
    subset_seed: Seed = 0  # not the run's: the seeds of a study share their images
    view_seed: Seed | None = None  # of crops; null: the run's. Set, seeds of a study share crops
    source: Literal["shards", "folder"] = "shards"
    cache_dir: str = "~/.cache/mimkit"
    cache_gib: float | None = Field(64.0, gt=0)  # of shards from servers; null: what the disk has
    window: int = Field(8, ge=1)  # shards that are shuffled together
    exif: Literal["ignore", "honour"] = "ignore"  # BEiT ignores the orientation tag
    on_bad_sample: Literal["raise", "substitute"] = "raise"  # substitutes are counted and said
    max_bad_samples: float = Field(0.001, ge=0, le=1)  # of those drawn; more, and over ten, stops

    def seed_of_views(self, seed: int) -> int:
        """The key of crops and augmentations in a run with this seed."""
        return seed if self.view_seed is None else self.view_seed

    @field_validator("subset", mode="before")
    @classmethod
    def _share_or_path(cls, subset: Any) -> Any:
        """1e-2 is text in YAML 1.1."""
        try:
            return subset if subset is None else float(subset)
        except (TypeError, ValueError):
            return subset

    @model_validator(mode="after")
    def _one_choice(self) -> Self:
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


class CroppedConfig(SourceConfig):
    """And how a random crop is drawn."""

    flip: float = Field(0.5, ge=0, le=1)
    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)

    @model_validator(mode="after")
    def _ordered_ranges(self) -> Self:
        for name, (low, high), most in (("crop_scale", self.crop_scale, 1.0),
                                        ("crop_ratio", self.crop_ratio, float("inf"))):  # fmt: skip
            if not 0 < low <= high <= most:
                raise ValueError(f"{name} is [{low:g}, {high:g}]; expected 0 < smallest <= largest"
                                 + (f" <= {most:g}" if name == "crop_scale" else ""))  # fmt: skip
        return self


class DataConfig(CroppedConfig):
    """Where images come from and how a view is cut (BEiT's transform, facts in README)."""

    image_size: int = Field(224, ge=8)  # pixels, the encoder's view
    token_size: int = Field(112, ge=8)  # pixels, the tokenizer's view
    image_interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    token_interpolation: Literal["lanczos", "bicubic", "bilinear"] = "lanczos"
    jitter: float = Field(0.4, ge=0, lt=1)  # brightness, contrast, saturation
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[Positive, Positive, Positive] = (0.5, 0.5, 0.5)
    heldout_limit: int = Field(2048, ge=1)  # images of the held-out loss
