"""What to know of an evaluation: whether the model was made with the images that judge it."""

from pathlib import Path

from mimkit import build
from mimkit.config import load_finetune_config
from mimkit.data.overlap import shared_images
from mimkit.data.sources import Source
from mimkit.errors import UserError


def notes_on_training(config: Path, source: Source) -> list[str]:
    """Of the images of `source` that a finetuning trained on, or chose its weights by.

    Args:
        config: its config.yaml. Its data are opened as it names them; nothing is fetched.
    """
    data = load_finetune_config(config).data
    if "://" in f"{data.train} {data.heldout}":
        return [f"the data of {config} are on a server: whether the model was trained on these "
                "images was not looked at"]  # fmt: skip
    try:
        train, heldout = build.build_data(data)
    except (UserError, OSError) as error:
        return [f"whether the model was trained on these images is not known, as the data of "
                f"{config} cannot be opened from here: {error}"]  # fmt: skip
    notes = []
    if (shared := shared_images(train, source)).same:
        notes.append(
            f"about {shared.estimate} of the {len(source)} images are those that the model was "
            f"trained on ({shared.same} of {shared.compared} that were compared, by key and "
            "bytes): it has seen their labels"
        )
    if heldout is not None and (shared := shared_images(heldout, source)).same:
        notes.append(
            f"about {shared.estimate} of the {len(source)} images are those by which its best "
            "weights were chosen (data.heldout of its run): their score flatters a little"
        )
    return notes
