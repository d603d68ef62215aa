"""Finetuning from end to end, on photographs: what trains, what stays, what is refused."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from commands import ROOT, Shards, command, finetune
from torch import Tensor

import mimkit
from mimkit.classifier_io import load_classifier
from mimkit.config import load_finetune_config, science_hash
from mimkit.downstream.predictions import load_predictions
from mimkit.downstream.scores import classification_scores
from mimkit.export._tensors import read_tensors
from mimkit.finetuning_parts import settled
from mimkit.models.classifier import ImageClassifier
from mimkit.train import checkpoint

Run = Callable[..., Path]
MIXED = ["train.mixup=0.8", "train.cutmix=1.0", "train.mix_group=4", "data.erasing=0.5",
         "data.augment=rand-m9-mstd0.5-inc1", "data.repeats=2", "model.drop_path=0.2"]  # fmt: skip


@pytest.fixture(scope="module")
def small(shards: Shards, tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that make configs/finetune_small.yaml a finetuning of seconds."""
    kept = ("data.train", "data.heldout=", "data.cache_dir", "data.image_size")
    return [
        *(word for word in tiny if word.startswith(kept)),
        f"output.runs_dir={tmp_path_factory.mktemp('runs')}",
        "train.epochs=null", "train.steps=6", "train.batch_size=8", "data.augment=null",
        "engine.runtime=local", "engine.precision=fp32", "engine.workers=0", "engine.threads=1",
        "output.log_every=1", "output.checkpoint_every=2", "output.evaluate_every=3",
        "output.tensorboard=false",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(small: list[str], finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Finetunes the encoder of `finished_run` in this process; gives the run folder."""

    def go(*words: str, out: Path | None = None, init: str = str(finished_run)) -> Path:
        folder = out or tmp_path_factory.mktemp("finetuned") / "run"
        assert finetune([*small, f"init={init}", *words, f"output.dir={folder}"]) == 0
        return folder

    return go


@pytest.fixture(scope="module")
def whole(run: Run) -> Path:
    """A plain run; tests leave it as it is."""
    return run()


SCRATCH = ["init=null", "stem=linear", "encoder.size=Ti", "encoder.depth=2", "encoder.patch_size=8"]


def _summary(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))


def _losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def _last(folder: Path) -> checkpoint.Checkpoint:
    path = checkpoint.latest(folder / "checkpoints")
    assert path is not None
    return checkpoint.load(path)


def _cut(folder: Path, out: Path, *, keep: int) -> Path:
    """A copy that was killed after the checkpoint at update `keep`."""
    shutil.copytree(folder, out, symlinks=True)
    (out / "summary.json").unlink()
    for path in (out / "checkpoints").iterdir():
        if path.name > f"step-{keep:08d}":
            shutil.rmtree(path)
    return out


def _refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert finetune(words) == 2
    return " ".join(capsys.readouterr().err.split())


def test_a_run_leaves_numbers_weights_and_predictions(whole: Path, shards: Shards) -> None:
    summary = _summary(whole)
    assert (summary["steps"], summary["classes"], summary["heldout_images"]) == (6, 4, 24)
    assert summary["trained_parameters"] == summary["parameters"]
    assert summary["best_update"] in (3, 6)
    predictions = load_predictions(whole / "best")
    scores = classification_scores(predictions)
    assert scores.top1.value == summary["best_top1"]
    assert len(predictions) == 24 and predictions.classes[0] == "astronaut.png"
    classifier = load_classifier(whole)
    assert classifier.classes == predictions.classes
    assert classifier.image_size == (32, 32)
    encoder = mimkit.load_encoder(whole)
    assert encoder.about["mimkit_run"] == whole.name
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        ours = classifier.model.encoder(classifier.model.stem(images))
        assert torch.equal(encoder.forward_features(images), ours)
    config = load_finetune_config(whole / "config.yaml")
    assert json.loads((whole / "run.json").read_text())["science"] == science_hash(config)


def test_checkpoints_of_a_finetuning_are_no_encoders_and_say_what_is(whole: Path) -> None:
    newest = checkpoint.latest(whole / "checkpoints")
    assert newest is not None
    with pytest.raises(ValueError, match="is a finetuning; only its best weights are opened"):
        mimkit.load_encoder(newest)


def test_the_best_weights_give_the_predictions_that_lie_beside_them(
    whole: Path, shards: Shards
) -> None:
    """Read back from the files, on the images of the shards."""
    from mimkit.batch import normalise
    from mimkit.data.sources.shards import ShardSource
    from mimkit.data.views import CenterView

    source, view = ShardSource(shards=str(shards.heldout)), CenterView(image_size=(32, 32))
    pixels = torch.stack([view(source[i].image).patch_view_CHW for i in range(len(source))])
    classifier, kept = load_classifier(whole), load_predictions(whole / "best")
    with torch.no_grad():
        logits = classifier.model(normalise(pixels, **classifier.normalisation._asdict()))
    assert torch.equal(logits.argmax(1), kept.best_BK[:, 0])
    expected = logits.log_softmax(1)[torch.arange(24), kept.label_B]
    torch.testing.assert_close(expected, kept.log_probability_B, rtol=0, atol=1e-5)


def test_the_loss_falls_and_the_classes_are_learnt(run: Run) -> None:
    """Four photographs, 96 crops of them: 40 updates are enough to tell them apart."""
    folder = run("train.steps=40", "train.lr=3e-3", "output.evaluate_every=40",
                 "output.checkpoint_every=40", "output.log_every=10")  # fmt: skip
    losses = _losses(folder)
    assert losses[-1] < losses[0] - 0.3
    assert _summary(folder)["heldout_top1"] > 0.6


def test_killed_and_continued_equals_uninterrupted_bit_for_bit(run: Run, tmp_path: Path) -> None:
    """With everything that is drawn: policy, erasing, mixing, copies, drop path, an average."""
    words = [*MIXED, "train.ema=0.9"]
    one = run(*words)
    other = _cut(one, tmp_path / "other", keep=2)
    run(*words, "engine.workers=1", out=other)
    assert _losses(one) == _losses(other)
    first, second = _last(one), _last(other)
    assert first.average is not None and second.average is not None
    for ours, theirs in ((first.weights, second.weights), (first.moments, second.moments),
                         (first.average, second.average)):  # fmt: skip
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert _summary(one)["best_top1"] == _summary(other)["best_top1"]
    same = [torch.equal(a, b) for a, b in zip(
        load_classifier(one).model.state_dict().values(),
        load_classifier(other).model.state_dict().values(), strict=True)]  # fmt: skip
    assert all(same)


ROLES = {
    "attention": {"attention", "head"},
    "[ffn, norm]": {"ffn", "norm", "head"},
    "bias": {"attention", "ffn", "norm", "stem", "head"},
    "stem": {"stem", "head"},
    "head": {"head"},
}


@pytest.mark.parametrize("roles", ROLES)
def test_only_the_roles_that_were_asked_for_move(run: Run, roles: str) -> None:
    """Frozen weights and running statistics are equal to the last bit, and so after a resume."""
    folder = run(f"train.roles={roles}", "train.lr=1e-2")
    moved = _summary(folder)["moved"]
    assert {kind for kind, row in moved.items() if row["moved"]} == ROLES[roles]
    last = _last(folder)
    assert {key.rpartition("/")[0] for key in last.moments} == _trained(folder)
    statistics = [name for name in last.weights if "running" in name or "tracked" in name]
    assert statistics
    first = checkpoint.load(folder / "checkpoints" / "step-00000004")
    still = [torch.equal(first.weights[n], last.weights[n]) for n in statistics]
    assert all(still) == (roles != "stem")
    if roles == "attention":
        again = _cut(folder, folder.parent / "again", keep=4)
        run(f"train.roles={roles}", "train.lr=1e-2", out=again)
        assert {n for n, w in _last(again).weights.items()
                if not torch.equal(w, last.weights[n])} == set()  # fmt: skip


def _trained(folder: Path) -> set[str]:
    """By the file: what differs between two checkpoints, and has moments to do so."""
    first = checkpoint.load(folder / "checkpoints" / "step-00000004").weights
    last = _last(folder).weights
    names = {n for n in last if not n.rpartition(".")[2].startswith(("running", "num_batches"))}
    return {n for n in names if not torch.equal(first[n], last[n])}


DEEPSPEED = ["engine.runtime=deepspeed", "output.dir=run"]


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_zero_stages_train_the_attention_alone_as_plain_pytorch_does(
    run: Run, small: list[str], finished_run: Path, tmp_path: Path, stage: int
) -> None:
    words = [*small, f"init={finished_run}", "train.roles=attention", *MIXED]
    ended = command([ROOT / "tools" / "finetune.py", *words, *DEEPSPEED,
                     f"engine.zero_stage={stage}"], cwd=tmp_path)  # fmt: skip
    assert ended.code == 0, ended.err
    plain = run("train.roles=attention", *MIXED)
    assert _losses(tmp_path / "run") == pytest.approx(_losses(plain), abs=1e-5)
    moved = _summary(tmp_path / "run")["moved"]
    assert {kind for kind, row in moved.items() if row["moved"]} == {"attention", "head"}
    assert "What moved" in ended.out


TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stage", "roles"), [(2, 3, "attention"), (4, 0, "all")])
def test_ranks_change_nothing(
    run: Run, small: list[str], finished_run: Path, shards: Shards, tmp_path: Path,
    ranks: int, stage: int, roles: str,
) -> None:  # fmt: skip
    """Mixing, copies, drop path and erasing are those of the global batch; the test set's numbers
    are the same ones."""
    group = "train.mix_group=2"
    words = [*MIXED, group, f"data.test={shards.heldout}", "train.ema=0.9", f"train.roles={roles}"]
    here = [*small, f"init={finished_run}", *words, *DEEPSPEED, f"engine.zero_stage={stage}"]
    ended = command([*TORCHRUN, f"--nproc-per-node={ranks}", ROOT / "tools" / "finetune.py",
                     *here], cwd=tmp_path)  # fmt: skip
    assert ended.code == 0, ended.out[-2000:] + ended.err[-2000:]
    plain = run(*words)
    assert _losses(tmp_path / "run") == pytest.approx(_losses(plain), abs=2e-5)
    ours, theirs = _summary(tmp_path / "run"), _summary(plain)
    for name in ("heldout_top1", "test_top1", "best_update"):
        assert ours[name] == theirs[name]
    moved, expected = ({kind: bool(row["moved"]) for kind, row in summary["moved"].items()}
                       for summary in (ours, theirs))  # fmt: skip
    assert moved == expected
    for folder in ("best", "test"):
        one, other = (load_predictions(f / folder) for f in (tmp_path / "run", plain))
        assert torch.equal(one.best_BK[:, 0], other.best_BK[:, 0])


def test_the_test_set_is_judged_by_the_best_weights(
    run: Run, shards: Shards, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(f"data.test={shards.heldout}", "train.lr=1e-2")
    assert "note: data.test are the images of data.heldout" in capsys.readouterr().out
    summary = _summary(folder)
    assert summary["test_top1"] == summary["best_top1"]  # the same images, the best weights
    kept, tested = load_predictions(folder / "best"), load_predictions(folder / "test")
    assert torch.equal(kept.best_BK, tested.best_BK)


def test_without_held_out_images_the_last_weights_are_kept(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run("data.heldout=null")
    assert "No held-out images" in capsys.readouterr().out
    last = _last(folder).weights
    kept = load_classifier(folder).model.state_dict()
    assert {n for n in kept if not torch.equal(kept[n], last[n])} == set()


def test_from_scratch_with_lamb_and_binary_losses(small: list[str], tmp_path: Path) -> None:
    words = [*small, *SCRATCH, "train.optimizer=lamb", "train.loss=bce", "train.bce_threshold=0",
             "train.smoothing=0", "train.layer_decay=1", "model.pooling=cls", "data.repeats=3",
             "train.mixup=0.1", "train.cutmix=1", "train.mix_group=4",
             "model.head_scale=0"]  # fmt: skip
    assert finetune([*words, f"output.dir={tmp_path / 'run'}"]) == 0
    assert _losses(tmp_path / "run")[0] == pytest.approx(math.log(2), abs=1e-6)
    other = _cut(tmp_path / "run", tmp_path / "other", keep=4)
    assert finetune([*words, f"output.dir={other}"]) == 0
    assert _losses(tmp_path / "run") == _losses(other)


def test_lamb_on_flat_shards_is_refused(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*small, *SCRATCH, "train.optimizer=lamb", "engine.runtime=deepspeed",
             f"output.dir={tmp_path / 'run'}"]  # fmt: skip
    said = _refused(words, capsys)
    assert "ZeRO stage 1 hands the optimizer flat shards that are no layers" in said
    assert "engine.zero_stage=0" in said


def test_a_delta_is_a_part_of_the_size_and_merges_back_exactly(
    run: Run, finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = run("train.roles=attention", out=tmp_path / "a" / "run")
    capsys.readouterr()
    delta = run("train.roles=attention", "output.delta=true", out=tmp_path / "b" / "run")
    assert f"Next: mimkit merge {delta} {finished_run} OUT" in capsys.readouterr().out
    files = {path.name: path.stat().st_size for path in (delta / "best").iterdir()}
    assert "model.safetensors" not in files
    size = (plain / "best" / "model.safetensors").stat().st_size
    assert files["delta.safetensors"] < 0.4 * size
    with pytest.raises(ValueError, match="mimkit merge"):
        mimkit.load_encoder(delta)
    from mimkit.cli import main

    assert main(["merge", str(delta), str(finished_run), str(tmp_path / "out")]) == 0
    for name in ("model.safetensors", "head.safetensors"):
        (facts, ours), (expected, theirs) = (
            read_tensors(folder / name) for folder in (tmp_path / "out", plain / "best")
        )
        assert facts == expected and ours.keys() == theirs.keys()
        assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    capsys.readouterr()
    assert main(["merge", str(delta), str(plain), str(tmp_path / "other")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "belongs to an encoder with the hash" in said and str(finished_run) in said
    assert not (tmp_path / "other").exists()


def test_a_finetuned_model_is_finetuned_further_at_another_size(
    run: Run, whole: Path, shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As BEiT's 384-pixel stage: the head goes with it, positions are resized; not square."""
    shutil.copytree(shards.heldout, tmp_path / "nameless")
    (tmp_path / "nameless" / "classes.json").unlink()
    capsys.readouterr()
    folder = run("data.image_size=[48, 40]", "train.lr=1e-9", "train.min_lr=0",
                 f"data.heldout={tmp_path / 'nameless'}", init=str(whole))  # fmt: skip
    said = capsys.readouterr().out
    assert "note: data.heldout names no classes (no classes.json beside the images)" in said
    assert "positions: 4x4 -> 6x5 patches" in said
    assert "the head of 4 classes was taken over" in said
    before, after = load_classifier(whole).model, load_classifier(folder).model
    torch.testing.assert_close(before.head.weight, after.head.weight, rtol=0, atol=1e-6)
    assert after.encoder.grid == (6, 5)


BAD = {
    "a head of more classes": (["model.classes=5"], "model.classes=5, but classes.json beside "
                               "data.train names 4 classes"),
    "a head of fewer classes": (["model.classes=3"], "set model.classes=null"),
    "no multiple of the patch": (["data.image_size=36"], "does not divide into patches of 8"),
    "a role of nothing": (["train.roles=position", *SCRATCH,
                           "encoder.positions=none"], "no parameter of the role position; it has"),
    "mixing groups": (["train.mixup=1", "train.mix_group=16"], "set train.mix_group to a divisor"),
    "a policy timm does not know": (["data.augment=rnad-m9"], "data.augment is 'rnad-m9'"),
    "a fresh head that is frozen": (["train.roles=attention", "train.freeze_head=true"],
                                    "it is a fresh one"),
    "two beginnings": (["stem=linear"], "init=null to train from scratch"),
    "no beginning": (["init=null"], "give init=RUN"),
    "all and more": (["train.roles=[all, norm]"], "all is every role already"),
    "no such role": (["train.roles=mlp"], "train.roles"),
    "a missing encoder": (["init=nowhere"], "init=nowhere is not there"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_settings_are_named_before_training(
    what: str, small: list[str], finished_run: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words, expected = BAD[what]
    base = [*small, f"output.dir={tmp_path / 'runs' / 'mine' / 'run'}"]
    if not any(word.startswith("init=") for word in words):
        base.append(f"init={finished_run}")
    assert expected in _refused([*base, *words], capsys)
    assert not (tmp_path / "runs").exists()  # nor an empty folder


def _relabelled(shards: Shards, folder: Path, classes: list[str]) -> Path:
    """The held-out images under other names of classes."""
    shutil.copytree(shards.heldout, folder)
    (folder / "classes.json").write_text(json.dumps(classes))
    return folder


def test_splits_that_mean_other_classes_are_refused(
    small: list[str], finished_run: Path, shards: Shards, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    base = [*small, f"init={finished_run}", f"output.dir={tmp_path / 'run'}"]
    names = json.loads((shards.train / "classes.json").read_text())
    swapped = _relabelled(shards, tmp_path / "swapped", [names[1], names[0], *names[2:]])
    said = _refused([*base, f"data.heldout={swapped}"], capsys)
    assert "label 0 is 'astronaut.png' and 'chelsea.png'" in said
    fewer = _relabelled(shards, tmp_path / "fewer", names[:3])
    assert "have 4 and 3 names" in _refused([*base, f"data.test={fewer}"], capsys)
    (fewer / "classes.json").write_text('["astronaut.png", "chel')
    said = _refused([*base, f"data.test={fewer}"], capsys)
    assert f"{fewer / 'classes.json'} does not name the classes (Unterminated string" in said


def test_images_without_labels_are_counted_and_their_shards_named(
    small: list[str], finished_run: Path, shards: Shards, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    sets = f"[{{shards: {shards.train}/train-00000.tar}}, {{shards: {shards.train}/train-00001.tar, labels: false}}]"  # noqa: E501
    said = _refused([*small, f"init={finished_run}", f"data.train={sets}",
                     f"output.dir={tmp_path / 'run'}"], capsys)  # fmt: skip
    assert "32 of 64 images have no label, in 1 shards" in said and "train-00001.tar" in said


def test_the_link_to_the_newest_run_means_what_it_points_at(
    small: list[str], run: Run, whole: Path, finished_run: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """It moves to the run that it starts; the same command means the same run all the same."""
    link = tmp_path / "latest"
    link.symlink_to(finished_run)
    folder = run(init=str(link), out=tmp_path / "run")
    assert link.readlink() == Path("run")
    config = load_finetune_config(folder / "config.yaml")
    assert config.init == str(finished_run) and _losses(folder) == _losses(whole)
    again = [*small, f"init={link}", f"output.dir={folder}"]
    capsys.readouterr()
    assert finetune(again) == 0 and "is finished already" in capsys.readouterr().out
    said = _refused([*again, "seed=1", f"output.dir={tmp_path / 'other'}"], capsys)
    assert f"a finetuning that began with init={finished_run}; name that" in said
    assert settled(config.model_copy(update={"init": f"{folder}/best"})).init == f"{folder}/best"


def test_the_link_to_the_newest_run_must_point_at_one(
    small: list[str], finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link, words = tmp_path / "latest", [*small, f"output.dir={tmp_path / 'run'}"]
    link.symlink_to("gone")
    assert "points at gone, which is not there" in _refused([*words, f"init={link}"], capsys)
    (tmp_path / "gone").mkdir()
    assert "gone is no run folder" in _refused([*words, f"init={link}"], capsys)
    link.unlink()
    link.symlink_to(finished_run)
    step = checkpoint.latest(finished_run / "checkpoints")
    assert step is not None
    config = load_finetune_config(
        ROOT / "configs" / "finetune_small.yaml", [f"init={link}/checkpoints/{step.name}"]
    )
    assert settled(config).init == str(step)
    assert not (tmp_path / "run").exists()


def test_weights_of_which_most_do_not_match_are_refused(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two names of a ViT among many others: too little of the encoder."""
    from safetensors.torch import save_file

    weights: dict[str, Tensor] = {f"layer.{i}.thing": torch.zeros(3) for i in range(209)}
    weights |= {
        "patch_embed.proj.weight": torch.zeros(16, 3, 8, 8),
        "cls_token": torch.zeros(1, 1, 16),
    }
    save_file(weights, tmp_path / "odd.safetensors")
    said = _refused([*small, f"init={tmp_path / 'odd.safetensors'}",
                     f"output.dir={tmp_path / 'run'}"], capsys)  # fmt: skip
    assert "odd.safetensors" in said


# Of the sources that the files name: rate, batch, epochs, layer decay, weight decay, drop path,
# (mixup, cutmix), smoothing, erasing
RECIPES = {
    "finetune_beit_base": (4e-3, 1024, 100, 0.65, 0.05, 0.1, (0.8, 1.0), 0.1, 0.25),
    "finetune_beit_large": (1e-3, 1024, 50, 0.75, 0.05, 0.2, (0.8, 1.0), 0.1, 0.25),
    "finetune_beit_cifar100": (3e-3, 512, 150, 0.65, 0.3, 0.1, (0.8, 1.0), 0.1, 0.0),
    "finetune_beit_linear": (4e-3, 1024, 50, 1.0, 1e-4, 0.0, (0.0, 0.0), 0.0, 0.0),
    "finetune_deit3_384": (1e-5, 512, 20, 1.0, 0.1, 0.15, (0.8, 1.0), 0.1, 0.0),
    "finetune_supervised_a2": (4e-3, 2048, 300, 1.0, 0.02, 0.05, (0.1, 1.0), 0.0, 0.0),
    "finetune_supervised_a2_400": (4e-3, 2048, 400, 1.0, 0.02, 0.05, (0.1, 1.0), 0.0, 0.0),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_have_the_numbers_of_their_sources(name: str) -> None:
    config = load_finetune_config(ROOT / "configs" / f"{name}.yaml")
    train = config.train
    assert RECIPES[name] == (
        train.lr, train.batch_size, train.epochs, train.layer_decay, train.weight_decay,
        config.model.drop_path, (train.mixup, train.cutmix), train.smoothing, config.data.erasing,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("size", "recipe", "millions"),
    [("S24x2", "finetune_supervised_a2", 85.9), ("S48", "finetune_supervised_a2", 85.9),
     ("L24", "finetune_supervised_a2_400", 304.4), ("L12x2", "finetune_supervised_a2_400", 304.4),
     ("B36", "finetune_supervised_a2_400", 256.7), ("B18x2", "finetune_supervised_a2_400", 256.7)],
)  # fmt: skip
def test_the_papers_parallel_models_are_built_by_name(
    size: str, recipe: str, millions: float
) -> None:
    """With as many parameters as the paper's Table 3 prints; L12x2 as many as L24."""
    from mimkit import build

    config = load_finetune_config(ROOT / "configs" / f"{recipe}.yaml", [f"encoder.size={size}"])
    assert config.encoder is not None and config.encoder.branches == (2 if "x2" in size else 1)
    with torch.device("meta"), mock.patch("mimkit.build.initialise"):
        encoder = build.build_untrained(config)
        model = ImageClassifier(encoder, num_classes=1000, pooling=config.model.pooling)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == millions
