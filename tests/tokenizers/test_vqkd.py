"""VQ-KD: nearest codes, the codebook that follows its tokens, and the training end to end."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from commands import ROOT, command, environment
from safetensors.torch import load_file, save_file
from test_pretraining import ENCODERS_VIEW, _settings, read  # noqa: F401
from torch import Tensor, nn

from mimkit import vqkd_training
from mimkit.cli import main
from mimkit.config import DvaeConfig, VqkdConfig, load_config, load_tokenizer_config
from mimkit.errors import UserError
from mimkit.tokenizers import TOKENIZERS
from mimkit.tokenizers._network_file import drawn_from
from mimkit.tokenizers._vqkd_file import VqkdSettings, load_vqkd, save_vqkd
from mimkit.tokenizers._vqkd_model import Vqkd, VqkdDecoder, code_colours
from mimkit.tokenizers._vqkd_training import Statistics, VqkdTrainee, cluster, update_codebook
from mimkit.train import checkpoint

CONFIG = ROOT / "configs" / "vqkd.yaml"
SIZES = {"width": 48, "heads": 3, "depth": 1, "patch_size": 8, "image_size": 32,
         "vocabulary": 16, "code_dim": 8}  # fmt: skip


def _cosine(predicted_MV: Tensor, target_MV: Tensor) -> Tensor:
    return 1 - nn.functional.cosine_similarity(predicted_MV, target_MV).mean()


def _draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def trainee() -> VqkdTrainee:
    with drawn_from(0):
        decoder = VqkdDecoder(width=48, heads=3, depth=1, grid=4, code_dim=8, features=24)
        made = VqkdTrainee(Vqkd(**SIZES), decoder, _cosine)
    made.vqkd.codebook_VC.copy_(nn.functional.normalize(torch.randn(16, 8, generator=_draw())))
    return made


def test_a_token_is_the_code_of_the_largest_cosine(vqkd_file: Path, photos: Tensor) -> None:
    """Encoder, projection and comparison, written out with timm's model as it is."""
    tokenizer = TOKENIZERS["vqkd"](path=str(vqkd_file))
    vqkd, view_BChw = tokenizer.vqkd, photos[:3, :, :32, :32]
    token_BND = vqkd.encoder.forward_features(view_BChw * 2 - 1)[:, 1:]
    first, _, last = vqkd.project
    projected_BNC = last(torch.tanh(first(token_BND)))
    cosine_BNV = nn.functional.cosine_similarity(
        projected_BNC[:, :, None], vqkd.codebook_VC[None, None], dim=-1
    )
    target_BN = tokenizer.encode(view_BChw)
    assert torch.equal(target_BN, cosine_BNV.argmax(-1))
    assert len(target_BN.unique()) > 5


def test_the_loss_is_the_teachers_plus_commitment(trainee: VqkdTrainee, photos: Tensor) -> None:
    view_BChw = photos[:2, :, :32, :32]
    feature_BNV = torch.randn(2, 16, 24, generator=_draw())
    loss, parts = trainee(view_BChw, feature_BNV, commitment=0.5)
    with torch.no_grad():
        direction_BNC = trainee.vqkd.directions(view_BChw)
        code_BNC = trainee.vqkd.codebook_VC[trainee.vqkd.nearest(direction_BNC)]
        predicted_BNV = trainee.decoder(code_BNC)
        expected = _cosine(predicted_BNV.flatten(0, 1), feature_BNV.flatten(0, 1))
        committed = (direction_BNC - code_BNC).square().mean()
    torch.testing.assert_close(direction_BNC.norm(dim=-1), torch.ones(2, 16))
    torch.testing.assert_close(parts["distillation"], expected)
    torch.testing.assert_close(parts["commitment"], committed)
    torch.testing.assert_close(loss.detach(), expected + 0.5 * committed)


def test_gradients_pass_straight_through_to_every_parameter(
    trainee: VqkdTrainee, photos: Tensor
) -> None:
    """Also without commitment: the token gets the code's gradient, which nothing else would."""
    loss, _ = trainee(photos[:2, :, :32, :32], torch.randn(2, 16, 24), commitment=0.0)
    loss.backward()
    silent = [
        name
        for name, parameter in trainee.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ]
    assert silent == []
    assert not trainee.vqkd.codebook_VC.requires_grad


def test_the_codebook_follows_its_tokens_by_the_formula(trainee: VqkdTrainee) -> None:
    """l2norm(decay * code + (1 - decay) * l2norm(mean of its tokens)); unused ones stay."""
    before_VC = trainee.vqkd.codebook_VC.clone()
    token_MC = nn.functional.normalize(torch.randn(40, 8, generator=_draw(1)))
    owner_M = torch.arange(40) % 5  # codes 5 to 15 have no token
    count_V = torch.bincount(owner_M, minlength=16).float()
    sum_VC = torch.zeros(16, 8).index_add_(0, owner_M, token_MC)
    revived = update_codebook(
        trainee, Statistics(count_V, sum_VC), decay=0.9, revive=0.0, generator=_draw()
    )
    assert revived == 0
    for code in range(16):
        own_MC = token_MC[owner_M == code]
        expected_C = before_VC[code]
        if len(own_MC):
            mean_C = own_MC.mean(0) / own_MC.mean(0).norm()
            expected_C = 0.9 * before_VC[code] + 0.1 * mean_C
            expected_C = expected_C / expected_C.norm()
        torch.testing.assert_close(trainee.vqkd.codebook_VC[code], expected_C)
    torch.testing.assert_close(trainee.share_V, 0.9 / 16 + 0.1 * count_V / 40)


def test_statistics_of_parts_add_up_to_those_of_the_whole(
    trainee: VqkdTrainee, photos: Tensor
) -> None:
    """So accumulated micro-batches and ranks, whose sums are added, change nothing."""
    view_BChw, feature_BNV = photos[:4, :, :32, :32], torch.randn(4, 16, 24)
    trainee(view_BChw, feature_BNV, commitment=1.0)
    whole = trainee.taken_statistics()
    for half in (slice(0, 2), slice(2, 4)):
        trainee(view_BChw[half], feature_BNV[half], commitment=1.0)
    halves = trainee.taken_statistics()
    assert torch.equal(whole.count_V, halves.count_V) and int(whole.count_V.sum()) == 64
    torch.testing.assert_close(whole.direction_VC, halves.direction_VC)
    assert not trainee.taken_statistics().count_V.any()


def test_dead_codes_start_again_beside_the_most_used(trainee: VqkdTrainee) -> None:
    used = torch.zeros(16)
    used[3], used[7], used[8:] = 60, 30, 10
    sums = trainee.vqkd.codebook_VC * used[:, None]  # tokens lie on their codes
    totals = []
    for update in range(200):
        statistics = Statistics(used.clone(), sums.clone())
        before_VC = trainee.vqkd.codebook_VC.clone()
        totals.append(
            update_codebook(trainee, statistics, decay=0.9, revive=0.1, generator=_draw(update))
        )
        if totals[-1]:
            break
    assert totals == [0] * (len(totals) - 1) + [6]  # codes 0, 1, 2, 4, 5, 6
    dead = torch.tensor([0, 1, 2, 4, 5, 6])
    moved_VC = trainee.vqkd.codebook_VC
    near = nn.functional.cosine_similarity(moved_VC[dead[0]], moved_VC[3], dim=0)
    assert 0.98 < float(near) < 1  # the most used one, with noise
    torch.testing.assert_close(moved_VC[3], before_VC[3])
    torch.testing.assert_close(moved_VC.norm(dim=1), torch.ones(16))
    assert torch.equal(trainee.share_V[0], trainee.share_V[3])
    assert 1 - 6 * 0.1 / 16 <= float(trainee.share_V.sum()) < 1  # what dead ones had is lost


def test_the_first_codebook_is_the_centres_of_the_tokens(
    trainee: VqkdTrainee, training_crops: Tensor
) -> None:
    """k-means: nearer to the tokens than tokens drawn at random, and the same on every rank."""
    with torch.no_grad():
        token_MC = trainee.vqkd.directions(training_crops[:64]).flatten(0, 1)

    def closeness() -> float:
        return float((token_MC @ trainee.vqkd.codebook_VC.T).max(dim=1).values.mean())

    cluster(trainee, training_crops[:64], generator=_draw(), rounds=0)
    random_ones = closeness()
    cluster(trainee, training_crops[:64], generator=_draw())
    centres_VC = trainee.vqkd.codebook_VC.clone()
    assert 1 - closeness() < 0.9 * (1 - random_ones)
    cluster(trainee, training_crops[:64], generator=_draw())
    assert torch.equal(trainee.vqkd.codebook_VC, centres_VC)
    cluster(trainee, training_crops[:1, :, :16, :16], generator=_draw())  # 4 tokens, 16 codes
    torch.testing.assert_close(trainee.vqkd.codebook_VC.norm(dim=1), torch.ones(16))


def test_near_codes_have_near_colours() -> None:
    angle_V = torch.linspace(0, 3, 60)
    book_VC = torch.stack([angle_V.cos(), angle_V.sin(), torch.zeros(60)], dim=1)
    colour_V3 = code_colours(book_VC)
    assert float(colour_V3.min()) == 0 and float(colour_V3.max()) == 1
    widest_V = colour_V3[:, 0]
    steps = widest_V.diff().abs()
    assert float(steps.max()) < 0.05


def test_a_file_comes_back_and_others_are_refused(vqkd_file: Path, tmp_path: Path) -> None:
    vqkd, settings = load_vqkd(vqkd_file)
    save_vqkd(tmp_path / "again.safetensors", vqkd, settings)
    again, _ = load_vqkd(tmp_path / "again.safetensors")
    assert all(torch.equal(w, again.state_dict()[n]) for n, w in vqkd.state_dict().items())
    of = TOKENIZERS["vqkd"]
    assert (
        of(path=str(vqkd_file)).fingerprint
        == of(path=str(tmp_path / "again.safetensors")).fingerprint
    )
    other = tmp_path / "other.safetensors"
    save_file(load_file(vqkd_file), other, {"mimkit.dvae": "{}"})
    with pytest.raises(UserError, match=r"lacks the entry 'mimkit\.vqkd'.*--config vqkd"):
        load_vqkd(other)
    said = json.loads(settings.model_dump_json())
    save_file(load_file(vqkd_file), other, {"mimkit.vqkd": json.dumps({**said, "depth": 0})})
    with pytest.raises(UserError, match=r"depth: Input should be greater than or equal to 1"):
        load_vqkd(other)
    wider = VqkdSettings(**{**said, "vocabulary": 65})
    save_file(load_file(vqkd_file), other, {"mimkit.vqkd": wider.model_dump_json()})
    with pytest.raises(UserError, match=r"of another shape: codebook_VC"):
        load_vqkd(other)
    with pytest.raises(UserError, match=r"there is no file '.*missing' with a VQ-KD tokenizer"):
        load_vqkd(tmp_path / "missing")


# --- the training -------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def words(tiny: list[str], features_file: Path) -> list[str]:
    """Overrides of configs/vqkd.yaml that make it a training of seconds."""
    kept = ("data.train", "data.heldout", "data.cache_dir", "data.token_size", "engine.")
    return [
        *[word for word in tiny if word.startswith(kept)],
        f"teacher.path={features_file}", "teacher.normalise=layer",
        "model.patch_size=8", "model.depth=1", "model.vocabulary=32", "model.code_dim=8",
        "train.steps=12", "train.batch_size=8", "train.lr=1e-3",
        "output.log_every=1", "output.checkpoint_every=3", "output.evaluate_every=4",
        "output.picture_every=12", "output.tensorboard=false",
    ]  # fmt: skip


def _train(words: list[str], folder: Path) -> Path:
    with mock.patch("torch.cuda.is_available", return_value=False):
        code = main(["train_tokenizer", "--config", "vqkd", *words, f"output.dir={folder}"])
    assert code == 0
    return folder


@pytest.fixture(scope="session")
def trained(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _train(words, tmp_path_factory.mktemp("vqkd") / "run")


def _lines(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def _losses(run: Path) -> list[float]:
    return [line["loss"] for line in _lines(run, "train")]


def _last(run: Path) -> checkpoint.Checkpoint:
    path = checkpoint.latest(run / "checkpoints")
    assert path is not None
    return checkpoint.load(path)


def test_it_learns_what_the_teacher_says_with_many_codes(trained: Path) -> None:
    heldout = _lines(trained, "heldout")
    assert [line["step"] for line in heldout] == [4, 8, 12]
    distances = [line["heldout_distillation"] for line in heldout]
    assert distances[-1] < min(0.95, distances[0])
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["codes_used"] > 3
    assert "tokenizer.name=vqkd" in (trained / "tokenizer.md").read_text()
    assert (trained / "pictures" / "step-00000012.png").exists()


def test_the_file_is_a_tokenizer_and_remembers_how_it_was_made(
    trained: Path, photos: Tensor
) -> None:
    path = trained / "tokenizer.safetensors"
    tokenizer = TOKENIZERS["vqkd"](path=str(path))
    assert TOKENIZERS["vqkd"](path=str(trained)).fingerprint == tokenizer.fingerprint
    assert f"Fingerprint `{tokenizer.fingerprint}`:" in (trained / "tokenizer.md").read_text()
    weights = _last(trained).weights
    assert torch.equal(tokenizer.vqkd.codebook_VC, weights["vqkd.codebook_VC"])
    assert tokenizer.encode(photos[:, :, :32, :48]).shape == (len(photos), 24)
    assert tokenizer.settings.training["measured"]["steps"] == 12
    assert tokenizer.settings.training["config"]["teacher"]["name"] == "features"


def test_killed_and_continued_equals_uninterrupted_bit_for_bit(
    words: list[str], trained: Path, tmp_path: Path
) -> None:
    """Codebook and shares are in the checkpoint; statistics never need to be."""
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "mimkit", "train_tokenizer", "--config", "vqkd", *words,
         f"output.dir={run}"], cwd=tmp_path, env=environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    limit = time.monotonic() + 100
    while not (run / "checkpoints" / "step-00000003" / "state.json").exists():
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (run / "summary.json").exists()
    _train(words, run)
    assert _losses(run) == _losses(trained)
    ours, theirs = _last(run), _last(trained)
    for one, other in ((ours.weights, theirs.weights), (ours.moments, theirs.moments)):
        assert [name for name in other if not torch.equal(one[name], other[name])] == []
    assert {"share_V", "vqkd.codebook_VC"} <= ours.weights.keys()


@pytest.mark.slow
def test_deepspeed_and_accumulation_change_nothing(
    words: list[str], trained: Path, tmp_path: Path
) -> None:
    words = [*words, "engine.runtime=deepspeed", "engine.zero_stage=2", "engine.accumulation=2"]
    ended = command(["-m", "mimkit", "train_tokenizer", "--config", "vqkd", *words,
                     "output.dir=run"], cwd=tmp_path)  # fmt: skip
    assert ended.code == 0, ended.err
    assert _losses(tmp_path / "run") == pytest.approx(_losses(trained), abs=1e-4)
    got, expected = _last(tmp_path / "run").weights, _last(trained).weights
    torch.testing.assert_close(got["share_V"], expected["share_V"], rtol=0, atol=1e-5)
    torch.testing.assert_close(
        got["vqkd.codebook_VC"], expected["vqkd.codebook_VC"], rtol=0, atol=1e-3
    )


@pytest.mark.slow
def test_two_ranks_equal_one(words: list[str], trained: Path, tmp_path: Path) -> None:
    """The codebook follows the tokens of all ranks."""
    words = [*words, "engine.runtime=deepspeed", "engine.zero_stage=1", "output.dir=run"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    tool = str(ROOT / "tools" / "train_tokenizer.py")
    ended = command([*launcher, tool, "--config", "vqkd", *words], cwd=tmp_path)
    assert ended.code == 0, ended.err[-3000:]
    assert _losses(tmp_path / "run") == pytest.approx(_losses(trained), abs=1e-4)
    assert [line["codes_used"] for line in _lines(tmp_path / "run", "heldout")] == [
        line["codes_used"] for line in _lines(trained, "heldout")
    ]


def test_it_reads_every_setting(words: list[str], tmp_path: Path, read: Any) -> None:  # noqa: F811
    more = ["train.steps=null", "train.epochs=0.25", f"output.runs_dir={tmp_path}"]
    config = load_tokenizer_config(CONFIG, [*words, *more])
    read.clear()
    with mock.patch("torch.cuda.is_available", return_value=False):
        vqkd_training.run(config, started_at=time.time())
    view = {("DataConfig", name) for name in ENCODERS_VIEW}
    view |= {("EngineConfig", "matmul")}  # torch multiplies here, which both of its values allow
    assert set(_settings(VqkdConfig)) - read <= view


def test_the_section_teacher_chooses_the_kind() -> None:
    assert isinstance(load_tokenizer_config(CONFIG), VqkdConfig)
    dvae = ROOT / "configs" / "tokenizer.yaml"
    assert isinstance(load_tokenizer_config(dvae), DvaeConfig)
    with pytest.raises(UserError, match=r"there is no setting 'objective\.kl_weight'"):
        load_tokenizer_config(CONFIG, ["objective.kl_weight=1"])
    with pytest.raises(UserError, match="is the configuration of a tokenizer's training"):
        load_config(CONFIG)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.zero_stage=3", "set engine.zero_stage to 0, 1 or 2"),
        ("engine.activation_checkpointing=true", "does nothing for a VQ-KD"),
        ("engine.token_bank=bank", "engine.token_bank does nothing for a VQ-KD"),
        ("model.patch_size=7", "data.token_size=32 is no multiple of model.patch_size=7"),
        ("model.patch_size=16", "makes a 2x2 grid of views of 32 pixels, but the teacher "
         "'features' 4x4; set model.patch_size=8"),
        ("teacher.architecture=test_vit", "leave out teacher.architecture=test_vit"),
        ("teacher.path=missing.pth", "there is no file 'missing.pth' with a teacher's weights"),
    ],
)  # fmt: skip
def test_settings_that_contradict_are_refused(
    override: str, message: str, words: list[str], tmp_path: Path
) -> None:
    config = load_tokenizer_config(CONFIG, [*words, override, f"output.runs_dir={tmp_path}"])
    assert isinstance(config, VqkdConfig)
    with pytest.raises(UserError) as caught:
        vqkd_training.run(config, started_at=time.time())
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_teacher_that_gives_words_is_refused(
    words: list[str], tokenizer_file: Path, tmp_path: Path
) -> None:
    kept = [word for word in words if not word.startswith("teacher.")]
    more = ["teacher=dvae", f"teacher.path={tokenizer_file}", f"output.runs_dir={tmp_path}"]
    config = load_tokenizer_config(CONFIG, [*kept, *more])
    assert isinstance(config, VqkdConfig)
    with pytest.raises(UserError, match=r"teacher\.name=dvae gives words"):
        vqkd_training.run(config, started_at=time.time())
