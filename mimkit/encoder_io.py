"""Encoders out of run folders, and into other libraries' files."""

from pathlib import Path

from torch import Tensor

from mimkit import build
from mimkit.batch import normalise
from mimkit.config import Config, load_config
from mimkit.data.loader import eval_loader
from mimkit.errors import UserError
from mimkit.export import EXPORTERS, ExportReport
from mimkit.models.encoder import ImageEncoder
from mimkit.train import checkpoint


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


def export_run(run: Path, *, format_name: str, out: Path, num_images: int = 8) -> ExportReport:
    """Writes the run's encoder as `out` and proves that it gives the same tokens there.

    The proof runs on held-out images of the run where they can be read, else on the embedded ones.
    """
    exporter = EXPORTERS[format_name]()
    config, encoder, newest = load_run(run)
    return exporter.export(
        encoder,
        out,
        image_BCHW=_images(config, num_images),
        mean=config.data.mean,
        std=config.data.std,
        metadata={"mimkit_run": str(newest), "mimkit_config": config.name},
    )


def _images(config: Config, num: int) -> Tensor:
    embedded = config.data.model_copy(update={"source": "shards"})
    for data, which in ((config.data, config.data.heldout), (embedded, "embedded")):
        if which is None:
            continue
        try:
            source = build.build_source(data, which, split="heldout")
        except UserError:
            if which == "embedded":
                raise
            continue  # the images of a run may lie on another machine
        batches = eval_loader(
            source=source, view=build.build_probe_view(config.data), mask=None, seed=config.seed,
            batch_size=num, rank=0, world=1, workers=0, limit=num,
        )  # fmt: skip
        images = next(iter(batches)).patch_view_BCHW
        return normalise(images, mean=config.data.mean, std=config.data.std)
    raise AssertionError("the embedded images are always there")
