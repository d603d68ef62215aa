"""Encoders out of run folders, and into other libraries' files."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mimkit import build
from mimkit.batch import normalise
from mimkit.config import Config, DataConfig, load_config
from mimkit.data.loader import eval_loader
from mimkit.errors import UserError
from mimkit.export import EXPORTERS, ExportReport
from mimkit.models.encoder import ImageEncoder
from mimkit.models.regroup import Movement, movement, regroup
from mimkit.train import checkpoint


@dataclass(frozen=True)
class RunExport:
    """The proof of the file, and how far a regrouped encoder's tokens moved (else empty)."""

    report: ExportReport
    moved: Sequence[Movement] = ()


def load_run(run: Path) -> tuple[Config, ImageEncoder, Path]:
    """The configuration of a pretraining run, its newest encoder in eval mode, its checkpoint.

    Args:
        run: a run folder, or one of its checkpoints.

    Raises:
        UserError: it is no run, has no checkpoint, or the checkpoint does not fit.
    """
    folder = run.parent.parent if (run / "state.json").exists() else run
    if not (folder / "config.yaml").exists():
        raise UserError(
            f"{run} is no run folder: it has no config.yaml. Give the folder that "
            "tools/pretrain.py named, for example runs/latest"
        )
    newest = run if folder != run else checkpoint.latest(folder / "checkpoints")
    if newest is None:
        raise UserError(
            f"{folder} has no checkpoint yet; it writes one every output.checkpoint_every updates"
        )
    config = load_config(folder / "config.yaml")
    weights = checkpoint.load(newest).weights
    model = build.build_model(config, prediction_dim=len(weights["head.bias"]))
    model.load_state_dict(dict(weights))
    return config, model.image_encoder.eval(), newest


def export_run(
    run: Path, *, format_name: str, out: Path, branches: int | None = None, num_images: int = 8
) -> RunExport:
    """Writes the run's encoder as `out` and proves that it gives the same tokens there.

    The proof runs on held-out images of the run where they can be read, else on the embedded ones.

    Args:
        branches: regroup a sequential encoder into blocks of so many branches, which moves its
            tokens; how far, on the images of the proof, is returned and written into the file.
    """
    exporter = EXPORTERS[format_name]()
    config, encoder, newest = load_run(run)
    metadata = {"mimkit_run": str(newest), "mimkit_config": config.name}
    image_BCHW = example_images(config.data, num=num_images)
    moved = list[Movement]()
    if branches is not None:
        sequential, encoder = encoder, regroup(encoder, branches=branches)
        moved = movement(sequential, encoder, image_BCHW)
        metadata["regrouped"] = _regrouped(branches, moved, images=len(image_BCHW))
    report = exporter.export(
        encoder,
        out,
        image_BCHW=image_BCHW,
        mean=config.data.mean,
        std=config.data.std,
        metadata=metadata,
    )
    return RunExport(report, moved)


def _regrouped(branches: int, moved: Sequence[Movement], *, images: int) -> str:
    rows = [row._asdict() for row in moved]
    return json.dumps({"branches": branches, "images": images, "moved": rows})


def example_images(data: DataConfig, *, num: int) -> Tensor:
    """image_BCHW, normalised: the first held-out images, else embedded photographs."""
    embedded = data.model_copy(update={"source": "shards"})
    for settings, which in ((data, data.heldout), (embedded, "embedded")):
        if which is None:
            continue
        try:
            source = build.build_source(settings, which, split="heldout")
        except UserError:
            if which == "embedded":
                raise
            continue  # the images of a run may lie on another machine
        batches = eval_loader(
            source=source, view=build.build_probe_view(data), mask=None, seed=0,
            batch_size=num, rank=0, world=1, workers=0, limit=num,
        )  # fmt: skip
        images = next(iter(batches)).patch_view_BCHW
        return normalise(images, mean=data.mean, std=data.std)
    raise AssertionError("the embedded images are always there")
