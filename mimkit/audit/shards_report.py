"""What the doctor of shards reports."""

from dataclasses import asdict, dataclass
from typing import Any

from mimkit.audit._shard_findings import REMEDIES, Finding
from mimkit.audit._shard_image_facts import ImageFacts
from mimkit.audit._shard_labels import Labels
from mimkit.audit._shard_records import Check
from mimkit.audit._shard_shuffle import Epoch, Shuffle
from mimkit.audit._shard_speed import Speed


@dataclass(frozen=True)
class TarFacts:
    """Attributes:
    path: as the pattern gives it.
    samples: images in it; 0 where it is damaged.
    bytes: of the file.
    checksum: against manifest.json; "none" where that has no SHA-256 of it.
    index: against the index beside it; "old" is one that will be made again.
    most_frequent, most_share: the label that it has most often, and its share of the images.
    """

    path: str
    samples: int
    bytes: int
    checksum: Check
    index: Check
    most_frequent: int | None = None
    most_share: float | None = None


@dataclass(frozen=True)
class Against:
    """The other split: its sound tars, their images, those decoded; and the images of this set
    that are in both, by their bytes or pixels."""

    tars: int
    samples: int
    decoded: int
    in_both: int


@dataclass(frozen=True)
class ShardReport:
    """What was found; None where there was nothing to measure.

    Attributes:
        problems: of the set and of the other split; a set with any is not fit.
        samples: images in sound tars.
        decoded: those whose pixels were looked at.
        sample: how many were to be drawn for that; None: all.
    """

    problems: tuple[Finding, ...]
    warnings: tuple[Finding, ...]
    samples: int
    decoded: int
    sample: int | None
    tars: tuple[TarFacts, ...]
    images: ImageFacts | None
    labels: Labels | None
    shuffle: Shuffle | None
    epoch: Epoch
    speed: Speed | None
    against: Against | None

    @property
    def fit(self) -> bool:
        return not self.problems

    def record(self) -> dict[str, Any]:
        """All of it for JSON, and what mends each kind of problem where its detail does not say."""
        kinds = {problem.kind for problem in self.problems}
        remedies = {kind: remedy for kind, remedy in REMEDIES.items() if kind in kinds}
        return {"fit": self.fit, **asdict(self), "remedies": remedies}
