"""The flight recorder: what it keeps, when it writes, and that replays name what went wrong."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from commands import ROOT, command, pretrain
from safetensors.torch import load_file

from mimkit.batch import Batch
from mimkit.build import build_data, build_views
from mimkit.cli import main
from mimkit.config import load_config
from mimkit.data.loader import train_loader
from mimkit.errors import UserError
from mimkit.ports import free_port
from mimkit.resources import configs_folder
from mimkit.train.flight import FlightRecorder


def _batch(*index: int) -> Batch:
    rows = len(index)
    return Batch(*(torch.zeros(rows, dtype=torch.uint8) for _ in range(4)), torch.tensor(index))


def _fly(recorder: FlightRecorder, losses: Sequence[float], *, norm: float = 1.0) -> None:
    """Updates of two samples each, weights growing from 0."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    for update, loss in enumerate(losses):
        recorder.begin(
            _batch(2 * update, 2 * update + 1), updates=update, first_row=0, position=2 * update
        )
        recorder.loss(torch.tensor(loss, requires_grad=True))
        weight = torch.full((4,), float(update))
        recorder.end(optimizer=optimizer, grad_norm=torch.tensor(norm), parts={"weight": weight})


def _recorder(folder: Path, *, kept: int = 64, rank: int = 0) -> FlightRecorder:
    return FlightRecorder(folder, rank=rank, world=2, facts={"seed": 7}, kept=kept)


def test_only_the_last_updates_are_kept_with_their_samples_and_norms(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path, kept=3)
    _fly(recorder, [1.0, 2.0, 3.0, 4.0, 5.0])
    folder = recorder.dump("a test")
    assert folder == tmp_path / "flight" / "update-00000005"
    story = json.loads((folder / "rank-00000.json").read_text())
    assert (story["reason"], story["suspect"], story["facts"]) == ("a test", 4, {"seed": 7})
    assert [row["update"] for row in story["updates"]] == [2, 3, 4]
    assert [row["losses"] for row in story["updates"]] == [[3.0], [4.0], [5.0]]
    assert all(row["lr"] == [0.5] and row["seconds"] >= 0 for row in story["updates"])
    tensors = load_file(folder / "rank-00000.safetensors")
    assert tensors["index/6/0"].tolist() == [6, 7]
    assert tensors["weight_norms/6"].tolist() == [6.0]  # of four threes


def test_the_suspect_is_the_first_update_that_is_not_finite(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path)
    _fly(recorder, [1.0, float("inf"), float("nan"), 1.0])
    assert recorder.first_not_finite() == 1
    folder = recorder.dump("a test")
    assert folder is not None
    assert folder.name == "update-00000002"
    rows = json.loads((folder / "rank-00000.json").read_text())["updates"]
    assert [row["losses"] for row in rows] == [[1.0], ["inf"], ["nan"], [1.0]]


def test_a_gradient_that_is_not_finite_is_one_too(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path)
    _fly(recorder, [1.0], norm=float("inf"))
    assert recorder.first_not_finite() == 0


def test_a_failure_is_written_down_and_raised_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = _recorder(tmp_path, rank=1)
    with pytest.raises(ZeroDivisionError), recorder.watch():
        _fly(recorder, [1.0])
        _ = 1 / 0
    story = json.loads((tmp_path / "flight/update-00000001/rank-00001.json").read_text())
    assert story["reason"] == "ZeroDivisionError: division by zero"
    assert "mimkit replay" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), UserError("disk is full")])
def test_what_is_no_failure_of_an_update_writes_nothing(
    error: BaseException, tmp_path: Path
) -> None:
    recorder = _recorder(tmp_path)
    with pytest.raises(type(error)), recorder.watch():
        _fly(recorder, [1.0])
        raise error
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written_the_error_still_arrives(tmp_path: Path) -> None:
    (tmp_path / "flight").write_text("a file")
    recorder = _recorder(tmp_path)
    with pytest.raises(UserError, match="could not be written down"), recorder.watch():
        _fly(recorder, [float("nan")])
        raise UserError("not finite")


def test_a_dump_of_many_large_batches_is_small(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    parts = {f"block.{number}.weight": torch.zeros(1) for number in range(300)}
    for update in range(100):
        recorder.begin(_batch(*range(1024)), updates=update, first_row=0, position=1024 * update)
        recorder.loss(torch.tensor(1.0))
        recorder.end(optimizer=optimizer, grad_norm=None, parts=parts)
    folder = recorder.dump("a test")
    assert folder is not None
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2**20


POISON = '''
import torch
from mimkit.models.stems.linear import Linear

class Poison(Linear):
    """Not a number for the images whose means are `means`."""

    def __init__(self, *, width: int, patch_size: int, means: list[float]) -> None:
        super().__init__(width=width, patch_size=patch_size)
        self.means = means
        self.register_buffer("mean_P", torch.tensor(means), persistent=False)

    @property
    def settings(self):
        return {"width": self.width, "patch_size": self.patch_size, "means": self.means}

    def forward(self, image_BCHW, mask_BN=None):
        tokens_BND = super().forward(image_BCHW, mask_BN)
        distance_BP = (image_BCHW.mean((1, 2, 3))[:, None] - self.mean_P).abs()
        bad_B = (distance_BP < 1e-5).any(1)
        return torch.where(bad_B[:, None, None], torch.nan, tokens_BND)
'''


def _poison(folder: Path, means: list[float], *places: int) -> list[str]:
    """Settings of a stem that is no number for the samples at these places of the order."""
    for place in places:
        nearest = min(abs(mean - means[place]) for at, mean in enumerate(means) if at != place)
        assert nearest > 1e-4, "another sample would be hit"
    (folder / "poison.py").write_text(POISON)
    return [f"stem={folder}/poison.py:Poison", f"stem.means={[means[p] for p in places]}"]


def _means(words: list[str], batches: int) -> tuple[list[float], list[int]]:
    """Of the normalised samples in the order in which a run sees them, and their numbers."""
    config = load_config(configs_folder() / "default.yaml", words)
    loader = train_loader(
        source=build_data(config.data)[0], views=build_views(config.data), mask=None, seed=0,
        batch_size=8, rank=0, world=1, position=0, window=config.data.window, workers=0,
    )  # fmt: skip
    means, indices = [], []
    for _, batch in zip(range(batches), loader, strict=False):
        view = batch.patch_view_BCHW.float() / 255
        means += ((view - 0.5) / 0.5).mean((1, 2, 3)).tolist()
        indices += batch.index_B.tolist()
    return means, indices


def test_a_replay_names_the_poisoned_sample(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of update 5, beyond the checkpoints at 2 and 4; two micro-batches an update."""
    means, indices = _means(tiny, 6)
    place = 38
    stem, run = _poison(tmp_path, means, place), tmp_path / "run"
    assert pretrain([*tiny, *stem, "engine.accumulation=2", f"output.dir={run}"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    dump = run / "flight" / f"update-{place // 8 + 1:08d}"
    assert f"mimkit replay {dump}" in said
    assert main(["replay", str(dump)]) == 0
    found = capsys.readouterr().out
    assert "first not finite: stem (Poison)" in found
    named = [line for line in found.splitlines() if line.startswith("  sample ")]
    assert len(named) == 1
    assert named[0].startswith(f"  sample {indices[place]}, key 'train_{indices[place]:03d}', in ")
    assert f"(row {place % 8} of the batch" in named[0]
    assert "update 5 from update 4: loss nan, recorded nan" in found

    # an update before it is sound, and repeated to the last digit
    assert main(["replay", str(dump), "--update", str(place // 8)]) == 1
    line = next(x for x in capsys.readouterr().out.splitlines() if "recorded" in x)
    before, numbers = line.split(": ")
    assert before == "update 4 from update 2"
    loss, recorded = (word.split()[-1] for word in numbers.split(","))
    assert loss == recorded


ROLLBACK = ["train.on_nonfinite=rollback", "train.max_nonfinite=1"]


def _named_after_a_way_back(
    dump: Path, place: int, indices: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Update 5 failed and was made anew with other samples, then 6 failed: the sample is named, and
    the new update 5 is repeated to the last digit."""
    assert main(["replay", str(dump)]) == 0
    found = capsys.readouterr().out
    named = [line for line in found.splitlines() if line.startswith("  sample ")]
    assert [line.split(",")[0] for line in named] == [f"  sample {indices[place]}"]
    assert f"(row {place % 8} of the batch" in named[0]
    assert "update 6 from update 4: loss nan, recorded nan" in found
    assert main(["replay", str(dump), "--update", "5"]) == 1
    line = next(x for x in capsys.readouterr().out.splitlines() if "recorded" in x)
    before, numbers = line.split(": ")
    assert before == "update 5 from update 4"
    loss, recorded = (word.split()[-1] for word in numbers.split(","))
    assert abs(float(loss) - float(recorded)) < 1e-4


def test_a_replay_knows_where_a_run_that_went_back_had_gone_on(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four batches; the fifth fails, back to update 4, the sixth is update 5; the seventh fails."""
    means, indices = _means(tiny, 8)
    stem, run = _poison(tmp_path, means, 35, 50), tmp_path / "run"
    assert pretrain([*tiny, *stem, *ROLLBACK, f"output.dir={run}"]) == 2
    assert "the gradients of 2 updates were not finite" in " ".join(capsys.readouterr().err.split())
    _named_after_a_way_back(run / "flight" / "update-00000006", 50, indices, capsys)


@pytest.mark.slow
def test_a_replay_repeats_in_one_process_what_two_ranks_did(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same at ZeRO 1 with two micro-batches of two images on either rank."""
    means, indices = _means(tiny, 8)
    stem, run = _poison(tmp_path, means, 35, 50), tmp_path / "run"
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    engine = ["engine.runtime=deepspeed", "engine.zero_stage=1", "engine.accumulation=2"]
    words = [*tiny, *stem, *ROLLBACK, *engine, f"output.dir={run}"]
    ended = command([*launcher, "tools/pretrain.py", *words], cwd=ROOT)
    assert "the gradients of 2 updates were not finite" in " ".join(ended.err.split())
    dump = run / "flight" / "update-00000006"
    assert sorted(path.name for path in dump.glob("*.json")) == [
        "rank-00000.json", "rank-00001.json"]  # fmt: skip
    _named_after_a_way_back(dump, 50, indices, capsys)


def test_a_replay_names_the_layer_whose_weights_grew_too_large(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wild = ["train.lr=1e30", "train.warmup=0", "train.clip_grad=0", "stem=linear"]
    assert pretrain([*tiny, *wild, f"output.dir={tmp_path / 'run'}"]) == 2
    capsys.readouterr()
    dump = tmp_path / "run" / "flight" / "update-00000002"
    assert main(["replay", str(tmp_path / "run")]) == 2
    assert f"It holds: {dump}" in " ".join(capsys.readouterr().err.split())
    assert main(["replay", str(dump)]) == 0
    found = capsys.readouterr().out
    assert "first not finite: encoder.blocks.0.attns.0.norm" in found
    assert "  sample" not in found  # every sample is hit


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_what_is_no_dump_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tmp_path / name)]) == 2
    assert "update-00000123" in " ".join(capsys.readouterr().err.split())
