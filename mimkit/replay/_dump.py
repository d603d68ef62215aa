"""Reading what a flight recorder wrote."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from mimkit.errors import UserError
from mimkit.train.flight import FORMAT


@dataclass(frozen=True)
class Dump:
    """Of the ranks whose files are there; ranks that were killed at once left none."""

    run: Path
    reason: str
    suspect: int  # updates done before the one that went wrong
    facts: dict[str, Any]
    world: int
    updates: dict[int, dict[int, dict[str, Any]]]  # rank -> number -> what is known, the last time
    tensors: dict[int, dict[str, Tensor]]  # rank -> index/POSITION/MICRO, weight_norms/POSITION

    def index(self, number: int) -> dict[int, list[int]]:
        """First row in the global batch -> the samples from there on, as far as ranks told."""
        found = {}
        for rank, updates in self.updates.items():
            if (known := updates.get(number)) is None:
                continue
            for micro, row in enumerate(known["first_rows"]):
                found[row] = self.tensors[rank][f"index/{known['position']}/{micro}"].tolist()
        return found

    def position(self, number: int) -> int | None:
        """Samples of all ranks consumed before that update, where a rank told."""
        known = (updates[number] for updates in self.updates.values() if number in updates)
        return next((int(row["position"]) for row in known), None)

    def recorded_loss(self, number: int) -> float | None:
        """The mean over ranks and micro-batches, where all are known."""
        rows = [ranks[number] for ranks in self.updates.values() if number in ranks]
        losses = [float(loss) for row in rows for loss in row["losses"] if loss is not None]
        whole = self.world * int(self.facts["accumulation"])
        return sum(losses) / whole if len(losses) == whole else None


def read_dump(path: Path) -> Dump:
    """A folder `flight/update-00000123`, or one of its files; UserError where it is none."""
    folder = path.parent if path.is_file() else path
    files = sorted(folder.glob("rank-*.json"))
    if not files:
        below = [*folder.glob("flight/update-*"), *folder.glob("update-*")]
        here = f". It holds: {', '.join(map(str, sorted(below)))}" if below else ""
        raise UserError(f"{path} is no dump of a flight recorder; expected a folder like "
                        f"RUN/flight/update-00000123 with rank-00000.json in it{here}")  # fmt: skip
    stories = [_story(file) for file in files]
    first = stories[0]
    return Dump(
        run=folder.resolve().parents[1],
        reason=first["reason"],
        suspect=min(story["suspect"] for story in stories),
        facts=first["facts"],
        world=first["world"],
        updates={story["rank"]: {row["update"]: row for row in story["updates"]}
                 for story in stories},
        tensors={story["rank"]: load_file(file.with_suffix(".safetensors"))
                 for story, file in zip(stories, files, strict=True)},
    )  # fmt: skip


def _story(file: Path) -> dict[str, Any]:
    try:
        story: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    if story.get("format") != FORMAT:
        raise UserError(f"{file} has format {story.get('format')}, this mimkit reads {FORMAT}; use "
                        "the version of mimkit that wrote it")  # fmt: skip
    return story
