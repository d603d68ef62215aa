"""Evaluation sets in the layouts they are published in, through docs/evaluation.md: its own Python,
`make_shards`, and `mimkit evaluate --set`. One small image a class, and all classes."""

import hashlib
import io
import json
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import ROOT
from PIL import Image
from scipy.io import savemat

from mimkit.classifier_io import Classifier, write_classifier
from mimkit.cli import main
from mimkit.data.known_sets import KNOWN_SETS
from mimkit.data.make_shards import make_shards
from mimkit.data.sources.shards import ShardSource
from mimkit.downstream.predictions import load_predictions
from mimkit.export._pretrained import Normalisation
from mimkit.models.classifier import ImageClassifier
from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.init import initialise
from mimkit.models.stems import STEMS

Truth = dict[str, int]  # the class of every image, by the end of its key


def _image(number: int, form: str = "JPEG") -> bytes:
    """8 x 8 pixels, other ones for each number."""
    colour = (number % 251, number // 251 % 251, 7 * number % 251)
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(buffer, form)
    return buffer.getvalue()


def _put(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def _hashed(number: int) -> str:
    """A name as iNaturalist and ImageNet-V2 give: no order of names is that of the classes."""
    return hashlib.md5(str(number).encode(), usedforsecurity=False).hexdigest()


def _follow_docs(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *changes: str) -> None:
    """Runs the block of docs/evaluation.md that names `what`, in `folder`."""
    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    [block] = [
        block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if what in block
    ]
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in block
        block = block.replace(old, new)
    monkeypatch.chdir(folder)
    exec(compile(block, "docs/evaluation.md", "exec"), {})


def _imagenet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Truth]:
    """As torchvision unpacks the official tars; images are numbered across the classes."""
    truth = {}
    for label in range(1000):
        name = f"ILSVRC2012_val_{(label * 7 + 3) % 1000 * 50 + 1:08d}"
        _put(folder / "val" / f"n{1440764 + 37 * label:08d}" / f"{name}.JPEG", _image(label))
        truth[name] = label
    return folder / "val", truth


def _imagenet_v2(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Truth]:
    out = folder / "imagenetv2-matched-frequency-format-val"
    for label in range(1000):
        _put(out / str(label) / f"{_hashed(label)}.jpeg", _image(label))
    return out, {_hashed(label): label for label in range(1000)}


def _inat(year: int, num: int) -> Callable[[Path, pytest.MonkeyPatch], tuple[Path, Truth]]:
    """Images under super-categories, classes in a file in COCO's format."""

    def make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Truth]:
        kinds, found = ("Plantae", "Insecta", "Aves", "Fungi"), folder / f"inat{year}"
        images, rows = [], []
        for label in range(num):
            name = f"train_val{year}/{kinds[label % 4]}/{label}/{_hashed(label)}.jpg"
            _put(found / name, _image(label))
            images.append({"id": 437513 + label, "width": 8, "height": 8, "file_name": name})
            rows.append({"id": label, "image_id": 437513 + label, "category_id": label})
        categories = [{"id": label, "name": str(label)} for label in range(num)]
        coco = {"info": {}, "images": images[::-1], "categories": categories, "annotations": rows}
        (folder / f"val{year}.json").write_text(json.dumps(coco))
        _follow_docs("val2018.json", folder, monkeypatch, '"inat2018"', f'"inat{year}"',
                     "val2018.json", f"val{year}.json", "inat18-val", "val")  # fmt: skip
        return folder / "links" / "val", {_hashed(label): label for label in range(num)}

    return make


def _flowers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Truth]:
    """Three images a class, one in each split."""
    label_N = np.random.default_rng(0).permutation(np.arange(306) % 102) + 1
    for number in range(1, 307):
        _put(folder / "jpg" / f"image_{number:05d}.jpg", _image(number))
    order = np.argsort(label_N, kind="stable") + 1
    splits = {name: order[place::3][None] for place, name in enumerate(("trnid", "valid", "tstid"))}
    savemat(folder / "setid.mat", splits)
    savemat(folder / "imagelabels.mat", {"labels": label_N[None].astype(np.uint8)})
    _follow_docs("setid.mat", folder, monkeypatch)
    train = [file.stem for file in (folder / "links" / "flowers-train").rglob("*.jpg")]
    assert sorted(train) == sorted(f"image_{n:05d}" for n in (*order[::3], *order[1::3]))
    truth = {f"image_{number:05d}": int(label_N[number - 1]) - 1 for number in order[2::3]}
    return folder / "links" / "flowers-test", truth


def _cars(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Truth]:
    label_N = np.random.default_rng(0).permutation(196) + 1
    kinds = [(f"bbox_{side}", "O") for side in ("x1", "y1", "x2", "y2")]
    rows = np.zeros((1, 196), [*kinds, ("class", "O"), ("fname", "O")])
    for number, label in enumerate(label_N, start=1):
        rows[0, number - 1] = (*np.uint8([1, 1, 8, 8])[:, None, None], label, f"{number:05d}.jpg")
        for images in ("cars_train", "cars_test"):
            _put(folder / images / f"{number:05d}.jpg", _image(number))
    (folder / "devkit").mkdir()
    savemat(folder / "devkit" / "cars_train_annos.mat", {"annotations": rows})
    savemat(folder / "cars_test_annos_withlabels.mat", {"annotations": rows})
    _follow_docs("cars_test_annos_withlabels.mat", folder, monkeypatch)
    truth = {f"{number:05d}": int(label) - 1 for number, label in enumerate(label_N, start=1)}
    return folder / "links" / "cars-test", truth


def _cifar(name: str, num: int) -> Callable[[Path, pytest.MonkeyPatch], tuple[Path, Truth]]:
    """The official pickles with fewer images, whose hashes torchvision is told not to expect."""

    def make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Truth]:
        from torchvision import datasets

        kind: Any = getattr(datasets, name)
        labels = np.random.default_rng(0).permutation(num).tolist()
        data = np.array([_pixels(number) for number in range(num)], np.uint8)
        names = [f"class_{(3 * label + 1) % num:03d}" for label in range(num)]
        key = "labels" if num == 10 else "fine_labels"
        batch = {"data": data.transpose(0, 3, 1, 2).reshape(num, -1), key: labels}
        base = folder / "ROOT" / kind.base_folder
        for file, _ in (*kind.train_list, *kind.test_list):
            _put(base / file, pickle.dumps(batch))
        _put(base / kind.meta["filename"], pickle.dumps({kind.meta["key"]: names}))
        for split in ("train_list", "test_list"):
            monkeypatch.setattr(kind, split, [(file, None) for file, _ in getattr(kind, split)])
        monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": None})
        _follow_docs("CIFAR100", folder, monkeypatch, "CIFAR100", name, "cifar100", "cifar")
        images = ShardSource(shards=_sharded(folder / "links" / "cifar-train", folder / "train"))
        every = len(kind.train_list) * num
        assert len(images) == every and images.classes == sorted(names)
        for key, index in zip(images.keys, range(every), strict=True):
            pixels = np.asarray(Image.open(io.BytesIO(images[index].image)))
            assert np.array_equal(pixels, data[int(key[-5:]) % num])
        place = {name: label for label, name in enumerate(sorted(names))}
        truth = {f"{number:05d}": place[names[label]] for number, label in enumerate(labels)}
        return folder / "links" / "cifar-test", truth

    return make


def _pixels(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (32, 32, 3), np.uint8)


def _sharded(images: Path, out: Path) -> str:
    make_shards(images, out, name="test")
    return str(out)


LAYOUTS = {
    "imagenet": _imagenet,
    "imagenet-v2": _imagenet_v2,
    "inat18": _inat(2018, 8142),
    "inat19": _inat(2019, 1010),
    "flowers": _flowers,
    "cars": _cars,
    "cifar10": _cifar("CIFAR10", 10),
    "cifar100": _cifar("CIFAR100", 100),
}


def test_every_known_set_has_its_layout_here() -> None:
    assert LAYOUTS.keys() == KNOWN_SETS.keys()


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Of so many classes, as a finetuning writes it; its weights are drawn."""

    def write(classes: int) -> Path:
        stem = STEMS["linear"](width=8, patch_size=4)
        encoder = ImageEncoder(stem, Encoder(width=8, heads=1, depth=1, grid=(2, 2)))
        initialise(encoder, seed=0)
        model = ImageClassifier(encoder, num_classes=classes, pooling="mean")
        model.initialise_head(seed=0, scale=1.0)
        pixels, folder = Normalisation((0.5,) * 3, (0.5,) * 3), tmp_path / "model"
        folder.mkdir()
        write_classifier(folder, Classifier(model, pixels, (), {}), base=None)
        return folder

    yield write


SLOW = {"inat18": pytest.mark.slow}  # 8,142 files


@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW.get(n, ())) for n in LAYOUTS])
def test_published_layouts(
    name: str, model: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The label of every image is its class; what is reported is the accuracy by those labels."""
    known = KNOWN_SETS[name]
    images, truth = LAYOUTS[name](tmp_path, monkeypatch)
    data, said = _sharded(images, tmp_path / "shards"), tmp_path / "said.safetensors"
    words = [str(model(known.classes)), data, "--set", name, "--workers", "0"]
    real = []
    if name == "imagenet":
        real = [[(number // 50 + 1) % 1000] if number % 100 else [] for number in range(50_000)]
        (tmp_path / "real.json").write_text(json.dumps(real))
        words += ["--real", str(tmp_path / "real.json")]
    record = tmp_path / "said.json"
    assert main(["evaluate", *words, "--predictions", str(said), "--json", str(record)]) == 0
    assert f"has {known.test_images} images, and these shards {len(truth)}" in " ".join(
        capsys.readouterr().out.split()
    )
    keys = [re.split("[/_]", key)[-1] if name != "flowers" else key[-11:]
            for key in ShardSource(shards=data).keys]  # fmt: skip
    if name == "imagenet":
        keys = [f"ILSVRC2012_val_{key}" for key in keys]
    found, numbers = load_predictions(said), json.loads(record.read_text())
    assert (
        found.label_B.tolist() == [truth[key] for key in keys]
        and found.num_classes == known.classes
    )
    guess_B = found.best_BK[:, 0]
    assert numbers["top1"]["value"] == float((guess_B == found.label_B).double().mean())
    if real:
        seen = [
            (guess, real[int(key[-8:]) - 1])
            for guess, key in zip(guess_B.tolist(), keys, strict=True)
        ]
        hits = torch.tensor([guess in labels for guess, labels in seen if labels]).double()
        assert numbers["real"]["value"] == float(hits.mean()) and numbers["real"]["total"] == 500
