"""What tests of several folders share: tiny shards, a tokenizer file, settings of a tiny run."""

import os
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread each, before anything imports torch
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
from commands import Shards, pretrain
from photographs import PHOTOGRAPHS, as_jpeg
from PIL import Image

from mimkit.data.writer import Item, ShardRecord, write_manifest, write_shard

CLASSES = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")  # one class each
CROPS = {"train": 96, "heldout": 24}


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes for the whole suite; none for some files, which are done before those start."""
    return 0 if config.option.file_or_dir else min(2, os.cpu_count() or 1)


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """Made of photographs by the real writer. Tests that break them copy them first."""
    folder = tmp_path_factory.mktemp("shards")
    for split, total in CROPS.items():
        (folder / split).mkdir()
        items, records = _crops(split, total), list[ShardRecord]()
        for number, part in enumerate(np.array_split(np.arange(total), 3 if total > 24 else 1)):
            path = folder / split / f"{split}-{number:05d}.tar"
            record = write_shard(path, [items[i] for i in part], split=split)
            assert record is not None
            records.append(record)
        write_manifest(folder / split, records, source="photographs", classes=[*CLASSES],
                       settings={})  # fmt: skip
    return Shards(folder / "train", folder / "heldout")


def _crops(split: str, total: int) -> list[Item]:
    images = [Image.open(PHOTOGRAPHS / name).convert("RGB") for name in CLASSES]
    rng = np.random.default_rng([*CROPS].index(split))
    items = []
    for number in range(total):
        image = images[number % len(images)]
        left, top = (int(rng.integers(side - 144)) for side in image.size)
        crop = image.resize((48, 48), Image.Resampling.BICUBIC, (left, top, left + 144, top + 144))
        items.append(
            Item(f"{split}_{number:03d}", as_jpeg(np.asarray(crop)), "jpg", number % len(images))
        )
    return items


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dVAE with 64 words, untrained; its logits are centred, or one word would be everywhere."""
    import torch

    from mimkit.random import Purpose, torch_generator
    from mimkit.tokenizers._dvae_file import save_dvae
    from mimkit.tokenizers._dvae_model import make_dvae

    dvae = make_dvae(width=16, blocks=1, vocabulary=64,
                     generator=torch_generator(Purpose.INIT, seed=0))  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        logits_BVyx = dvae.logits(torch.rand(16, 3, 32, 32, generator=draw))
        dvae.encoder.blocks.output.conv.b.sub_(logits_BVyx.mean((0, 2, 3)))
    path = tmp_path_factory.mktemp("tokenizer") / "dvae.safetensors"
    save_dvae(path, dvae, settings={}, half=True)
    return path


@pytest.fixture(scope="session")
def tiny(shards: Shards, tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory
         ) -> list[str]:  # fmt: skip
    """Overrides of the default configuration that make it a pretraining of seconds, 4 x 4 patches.

    Plain PyTorch and no loader processes; a test that wants DeepSpeed or workers says so after it.
    """
    cache = tmp_path_factory.mktemp("cache")
    return [
        f"data.train={shards.train}", f"data.heldout={shards.heldout}", f"data.cache_dir={cache}",
        "data.image_size=32", "data.token_size=32", "data.heldout_limit=24",
        f"tokenizer.path={tokenizer_file}",
        "encoder.size=Ti", "encoder.depth=1", "encoder.patch_size=8", "encoder.drop_path=0.2",
        "mask.num_masked=6",
        "train.steps=6", "train.batch_size=8", "train.lr=1e-3", "train.warmup=0.34",
        "engine.runtime=local", "engine.precision=fp32", "engine.workers=0", "engine.threads=1",
        "output.log_every=1", "output.checkpoint_every=2", "output.evaluate_every=3",
        "output.picture_every=3", "output.tensorboard=false", "probe.neighbours=5",
    ]  # fmt: skip


@pytest.fixture(scope="session")
def finished_run(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a pretraining by `mimkit pretrain`, six updates, in this process."""
    runs = tmp_path_factory.mktemp("finished") / "runs"
    words = [*tiny, f"output.runs_dir={runs}", "output.tensorboard=true"]
    assert pretrain(words) == 0
    return (runs / "latest").resolve()
