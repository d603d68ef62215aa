"""What can be wrong from outside ends in one paragraph with a remedy, and nothing half-done.

In this process an exception other than UserError fails the test; the commands below it show what
the user sees, and that launched ranks end too.
"""

import json
import pickle
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, Ended, Shards, command, pretrain
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from mimkit.build import deepspeed_file
from mimkit.cli import main
from mimkit.config import load_config
from mimkit.data.index import index_path
from mimkit.data.sources.shards import ShardSource
from mimkit.data.writer import Item, write_shard
from mimkit.errors import UserError
from mimkit.train.runtimes import RUNTIMES, UpdateRule
from mimkit.train.runtimes._deepspeed_json import KEYS, TYPES, check_used
from mimkit.train.runtimes.deepspeed import deepspeed_settings

Complaint = Callable[..., str]


@pytest.fixture
def complaint(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Complaint:
    """What `mimkit pretrain` says against settings; no run may look finished afterwards."""

    def say(*words: str, starts: bool = False) -> str:
        runs = tmp_path / "runs"
        began = time.perf_counter()
        assert pretrain([*tiny, f"output.runs_dir={runs}", *words]) == 2
        assert time.perf_counter() - began < 20
        assert runs.exists() == starts
        assert list(tmp_path.rglob("summary.json")) == []
        assert [path for path in tmp_path.rglob("*.tmp")] == []
        captured = capsys.readouterr()
        return _paragraph(captured.err)

    return say


def _paragraph(err: str) -> str:
    """The only thing said, apart from a progress bar: one paragraph, no traceback."""
    assert "Traceback" not in err
    assert err.count("mimkit: ") == 1, err
    *before, text = err.rstrip().split("\nmimkit: ")
    assert "\n\n" not in text
    bar = ("step/s", "s/step")  # tqdm turns it over where a step takes more than a second
    for line in "".join(before).splitlines():
        assert line.strip() == "" or any(unit in line for unit in bar)
    assert all(len(line) <= 100 or " " not in line for line in text.splitlines())
    return " ".join(text.split())


@pytest.fixture
def copied(shards: Shards, tmp_path: Path) -> Path:
    """The training shards, to be broken, without indexes."""
    folder = tmp_path / "broken"
    shutil.copytree(shards.train, folder)
    for tar in folder.glob("*.tar"):
        index_path(tar).unlink()
    return folder


def test_no_shards(complaint: Complaint, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said = complaint(f"data.train={tmp_path / 'empty'}")
    assert f"no shard found: looked for *.tar in {tmp_path / 'empty'}" in said
    assert "tools/make_shards.py" in said
    said = complaint(f"data.train={tmp_path / 'missing'}")
    assert f"{tmp_path / 'missing'}" in said and "do not exist" in said


@pytest.mark.parametrize("pattern", ["", "''", "[]", "['']"])
def test_an_empty_pattern(pattern: str, complaint: Complaint) -> None:
    said = complaint(f"data.train={pattern}")
    assert "data.train" in said


def test_a_pattern_that_names_more_than_there_is(complaint: Complaint, copied: Path) -> None:
    said = complaint(f"data.train={copied}/train-{{00000..00004}}.tar")
    assert "2 of 5 shards do not exist" in said
    assert "train-00003.tar" in said and "train-00004.tar" in said


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_truncated_tar(kept: float, complaint: Complaint, copied: Path) -> None:
    tar = copied / "train-00001.tar"
    data = tar.read_bytes().rstrip(b"\0")
    tar.write_bytes(data[: int(kept * len(data))])
    said = complaint(f"data.train={copied}")
    assert str(tar) in said
    assert "is empty" in said if kept == 0 else "cut short" in said


def test_a_bad_checksum(complaint: Complaint, copied: Path) -> None:
    tar = copied / "train-00000.tar"
    data = bytearray(tar.read_bytes())
    data[700] ^= 0xFF  # inside the first image
    tar.write_bytes(data)
    said = complaint(f"data.train={copied}")
    assert f"bad checksum: {tar}" in said
    assert "fetch it again" in said


def test_a_duplicate_key(complaint: Complaint, copied: Path) -> None:
    shutil.copy(copied / "train-00000.tar", copied / "again.tar")
    said = complaint(f"data.train={copied}")
    assert "the key 'train_000' is in" in said
    assert "again.tar" in said and "make_shards" in said


def test_a_compressed_shard(complaint: Complaint, tmp_path: Path) -> None:
    (tmp_path / "train.tar").write_bytes(b"\x1f\x8b\x08" + bytes(600))
    said = complaint(f"data.train={tmp_path / 'train.tar'}")
    assert "compressed with gzip" in said and "gunzip -k" in said


@pytest.mark.parametrize("workers", [0, 1])
def test_an_undecodable_image(workers: int, complaint: Complaint, tmp_path: Path) -> None:
    """Found when it is drawn, also by a loader process; the sample is named."""
    items = [Item(f"bad_{i}", b"\xff\xd8\xff\xe0 no picture", "jpg", 0) for i in range(8)]
    (tmp_path / "bad").mkdir()
    write_shard(tmp_path / "bad" / "train-00000.tar", items, split="train")
    said = complaint(f"data.train={tmp_path / 'bad'}", f"engine.workers={workers}")
    assert "cannot be decoded" in said
    assert "key 'bad_" in said and "train-00000.tar at byte" in said
    assert "data.on_bad_sample=substitute" in said


def test_an_undecodable_held_out_image(complaint: Complaint, tmp_path: Path) -> None:
    items = [Item(f"bad_{i}", b"\xff\xd8\xff\xe0 no picture", "jpg", 0) for i in range(8)]
    (tmp_path / "bad").mkdir()
    write_shard(tmp_path / "bad" / "heldout-00000.tar", items, split="heldout")
    said = complaint(f"data.heldout={tmp_path / 'bad'}", starts=True)
    assert "cannot be decoded" in said and "heldout-00000.tar" in said


TOKENIZER_FILES = {
    "missing": (None, "there is no tokenizer file"),
    "empty": (b"", "is empty"),
    "text": (b"<!DOCTYPE html><title>404</title>", "is text, not safetensors"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "pickle": (pickle.dumps({"weights": [1.0]}), "is a pickle"),
    "zip": (b"PK\x03\x04" + bytes(100), "is a pickle"),
    "noise": (bytes(range(1, 256)), "can not be read as safetensors"),
}


@pytest.mark.parametrize("kind", TOKENIZER_FILES)
def test_a_tokenizer_file_of_another_kind(kind: str, complaint: Complaint, tmp_path: Path) -> None:
    content, message = TOKENIZER_FILES[kind]
    path = tmp_path / "tokenizer.safetensors"
    if content is not None:
        path.write_bytes(content)
    said = complaint(f"tokenizer.path={path}")
    assert str(path) in said
    assert message in said
    assert "tools/train_tokenizer.py makes one" in said


def test_a_folder_that_is_no_run_of_a_tokenizer(complaint: Complaint, tmp_path: Path) -> None:
    said = complaint(f"tokenizer.path={tmp_path}")
    assert f"tokenizer.path={tmp_path} is a folder without tokenizer.safetensors" in said


def test_a_pickle_is_not_executed(complaint: Complaint, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "executed",)

    path = tmp_path / "tokenizer.pkl"
    path.write_bytes(pickle.dumps(Evil()))
    assert "is a pickle" in complaint(f"tokenizer.path={path}")
    assert not (tmp_path / "executed").exists()


def test_a_cut_tokenizer_file(complaint: Complaint, tokenizer_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(tokenizer_file.read_bytes()[:-1000])
    assert "may be cut short" in complaint(f"tokenizer.path={path}")


def test_grids_that_disagree(complaint: Complaint) -> None:
    said = complaint("data.token_size=64")
    assert "makes a 4x4 grid of 32-pixel views" in said
    assert "makes 8x8 of 64-pixel views" in said
    assert "set data.token_size=32" in said
    assert "data.token_size to 8 times the number" in complaint("data.token_size=33")
    assert "set data.image_size to a multiple of 8" in complaint("data.image_size=36")


def test_a_mask_that_cannot_be(complaint: Complaint) -> None:
    assert "set mask.num_masked to 1..15" in complaint("mask.num_masked=16")
    assert "set mask.num_masked to 1..15" in complaint("mask.num_masked=0")
    assert "mask.min_block in that range" in complaint("mask.num_masked=4", "mask.min_block=5")


def test_unknown_parts_and_settings(complaint: Complaint) -> None:
    assert "there is no stem called 'hmpl'. Did you mean 'hmlp'?" in complaint("stem=hmpl")
    assert "there is no mask called 'block'" in complaint("mask=block")
    assert "takes no setting 'nrom'. Did you mean 'norm'?" in complaint("stem.nrom=ln")
    assert "there is no setting 'train.stepz'" in complaint("train.stepz=3")
    assert "stem.norm" in complaint("stem.norm=gn")
    assert "encoder.patch_size to one of 4, 8, 14, 16, 32" in complaint("encoder.patch_size=5")


def test_an_unknown_verb_and_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrian"]) == 2
    assert "there is no verb 'pretrian'. Did you mean 'pretrain'?" in capsys.readouterr().err
    assert pretrain(["--config", "nowhere"]) == 2
    assert "there is no configuration file 'nowhere'" in _paragraph(capsys.readouterr().err)


def test_a_batch_that_does_not_divide(complaint: Complaint) -> None:
    said = complaint("train.batch_size=8", "engine.accumulation=3")
    assert "set train.batch_size=6 or 9" in said


def test_ranks_where_the_runtime_has_one(
    complaint: Complaint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "engine.runtime=deepspeed" in complaint()


def test_a_deepspeed_file_that_nobody_reads(complaint: Complaint) -> None:
    said = complaint("engine.deepspeed_config=ds.json")
    assert "would be ignored by engine.runtime=local" in said


def test_a_loss_that_is_not_finite(complaint: Complaint) -> None:
    said = complaint("train.lr=1e30", "train.warmup=0", "train.clip_grad=0", starts=True)
    assert "not finite at update" in said
    assert "lower train.lr" in said


def test_the_folder_of_something_else(complaint: Complaint, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    said = complaint(f"output.dir={tmp_path / 'mine'}")
    assert "is not empty and is no run of mimkit" in said
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("word", ["output.dir", "output.runs_dir", "data.cache_dir"])
def test_a_file_where_a_folder_should_be(
    word: str, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("precious")
    words = [*tiny, f"{word}={tmp_path / 'file'}"]
    words += ["data.train=embedded", "data.heldout=embedded"] if word == "data.cache_dir" else []
    assert pretrain(words) == 2
    assert str(tmp_path / "file") in _paragraph(capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


RULE = UpdateRule(micro_batch=4, accumulation=1, clip_grad=3.0, bf16=False, zero_stage=1,
                  deepspeed_config=None)  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"gradient_clipping": 1.0}, ["gradient_clipping to 1.0", "train.clip_grad makes it 3.0"]),
        ({"zero_optimization": {"stage": 2}}, ["stage to 2", "engine.zero_stage makes it 1"]),
        ({"train_batch_size": 16}, ["train_batch_size to 16", "train.batch_size makes it 8"]),
        ({"gradient_accumulation_steps": 2}, ["engine.accumulation makes it 1"]),
        ({"torch_autocast": {"enabled": True}}, ["engine.precision makes it False"]),
        ({"bf16": {"enabled": True}}, ["has 'bf16'", "engine.precision=bf16"]),
        ({"optimizer": {"type": "Lion"}}, ["has 'optimizer'", "train.lr"]),
        ({"scheduler": {"type": "WarmupLR"}}, ["has 'scheduler'", "train.warmup"]),
        ({"zero_optimisation": {"stage": 1}}, ["Did you mean 'zero_optimization'?"]),
        ({"gradient_cliping": 3.0}, ["Did you mean 'gradient_clipping'?"]),
        ({"zero_optimization": {"foo_bar": 3}}, ["zero_optimization", "foo_bar"]),
        ({"zero_optimization": {"reduce_bucket_sizee": 3}}, ["mean 'reduce_bucket_size'?"]),
        ({"zero_optimization": {"overlap_comm": "perhaps"}}, ["overlap_comm"]),
        ({"zero_optimization": 2}, ["zero_optimization = 2", "expected an object"]),
        ([1], ["holds no JSON object"]),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, ["stage=1", "at stage 3"]),
        ({"zero_optimization": {"stage3_max_live_parameters": 9}}, ["ignore", "at stage 3"]),
        ({"zero_optimization": {"ignore_unused_parameters": False}}, ["read at stage 2"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, ["trains on the CPU"]),
        ({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}, ["devise"]),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, ["DeepSpeed drops it"]),
        ({"zero_optimization": {"cpu_offload": True}}, ["use offload_optimizer"]),
        ({"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}}, ["own check"]),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, ["changes what is learnt"]),
        ({"zero_optimization": {"compute_grad_norm": False}}, ["clips by the gradient's"]),
        ({"communication_data_type": "bf16"}, ["'bf16'", "rounds gradients"]),
        ({"flops_profiler": {"enable": True}}, ["Did you mean 'enabled'?"]),
        ({"torch_autocast": {"lower_precision_safe_modules": []}}, ["DeepSpeed would ignore"]),
        ({"timers": {"throughput": {"synchronised": True}}}, ["Did you mean 'synchronized'?"]),
        ({"compile": {"deepcompile": True}}, ["does not call"]),
        ({"zero_force_ds_cpu_optimizer": False}, ["without offload_optimizer"]),
        ({"aio": {"block_size": 1}}, ["nothing is offloaded"]),
    ],
)
def test_a_deepspeed_file_that_contradicts(settings: Any, parts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(settings))
    rule = UpdateRule(**{**vars(RULE), "deepspeed_config": file})
    with pytest.raises(UserError) as caught:
        deepspeed_settings(rule, world=2, on_cpu=True)
    assert str(file) in str(caught.value)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_deepspeed_file_that_agrees_is_passed_on(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({
        "gradient_clipping": 3.0, "train_batch_size": 8, "wall_clock_breakdown": True,
        "zero_optimization": {"stage": 1, "overlap_comm": False, "reduce_bucket_size": 1000},
    }))  # fmt: skip
    rule = UpdateRule(**{**vars(RULE), "deepspeed_config": file})
    settings, plain = deepspeed_settings(rule, world=2), deepspeed_settings(RULE, world=2)
    assert settings.pop("wall_clock_breakdown") is True
    assert settings.pop("zero_optimization") == {
        **plain.pop("zero_optimization"), "overlap_comm": False, "reduce_bucket_size": 1000,
    }  # fmt: skip
    assert settings == plain


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_key_of_deepspeeds_own_section_is_judged_at_every_stage(
    stage: int, tmp_path: Path
) -> None:
    """A key that a newer DeepSpeed has must be sorted into one of the tables."""
    for key in DeepSpeedZeroConfig.model_fields:
        judged = [bare in KEYS for bare in (key, key.removeprefix("stage3_"))]
        assert any(judged), f"nobody has judged zero_optimization.{key}"
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"reduce_scatter": True}}))
    rule = UpdateRule(**{**vars(RULE), "zero_stage": stage, "deepspeed_config": file})
    if stage:
        assert deepspeed_settings(rule, world=1)["zero_optimization"]["reduce_scatter"] is True
    else:
        with pytest.raises(UserError, match=r"would ignore at engine\.zero_stage=0"):
            deepspeed_settings(rule, world=1)


@pytest.mark.parametrize("key", TYPES)
def test_a_value_of_another_kind_is_refused_by_its_key(key: str, tmp_path: Path) -> None:
    settings: object = 5 if TYPES[key] in (str, list, dict) else "yes"
    for word in reversed(key.split(".")):
        settings = {word: settings}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(settings))
    with pytest.raises(UserError, match=rf"{key.split('.', maxsplit=1)[0]}.*expected"):
        deepspeed_settings(UpdateRule(**{**vars(RULE), "deepspeed_config": file}), world=1)


def test_what_deepspeed_runs_with_must_be_what_it_was_given() -> None:
    given = {"gradient_clipping": 3.0, "steps_per_print": 9,
             "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 5}}  # fmt: skip
    used = {"gradient_clipping": 3.0, "zero_optimization": {"stage": 3, "prefetch_bucket_size": 5}}
    check_used(given, used, version="0.19.8")
    for key, value in (("gradient_clipping", 1.0), ("zero_optimization", {"stage": 2})):
        with pytest.raises(UserError, match=rf"DeepSpeed 0\.20 runs with {key}"):
            check_used(given, {**used, key: value}, version="0.20")


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"gradient_clipping": 1.0, "gradient_clipping": 3.0}')
    with pytest.raises(UserError, match="given twice: gradient_clipping"):
        deepspeed_settings(UpdateRule(**{**vars(RULE), "deepspeed_config": file}), world=1)


@pytest.mark.parametrize("content", [None, "{", "\0"])
def test_a_deepspeed_file_that_is_no_json(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=f"engine.deepspeed_config: cannot read {file}"):
        deepspeed_settings(UpdateRule(**{**vars(RULE), "deepspeed_config": file}), world=1)


def _tool(words: list[str], folder: Path, launcher: tuple[str, ...] = ()) -> Ended:
    return command([*launcher, str(ROOT / "tools" / "pretrain.py"), *words], cwd=folder)


def test_what_a_user_sees_of_a_contradiction(tiny: list[str], tmp_path: Path) -> None:
    """The whole way: DeepSpeed is started, nothing is printed but the paragraph, exit code 2."""
    (tmp_path / "ds.json").write_text('{"gradient_cliping": 3.0}')
    ended = _tool([*tiny, "engine.runtime=deepspeed", "engine.deepspeed_config=ds.json"], tmp_path)
    assert ended.code == 2
    assert ended.out == ""
    assert "Did you mean 'gradient_clipping'?" in _paragraph(ended.err)
    assert ended.seconds < 60
    assert [path.name for path in tmp_path.iterdir()] == ["ds.json"]


def test_a_port_that_another_job_uses(tiny: list[str], tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
        ended = command(
            [ROOT / "tools" / "pretrain.py", *tiny, "engine.runtime=deepspeed"],
            cwd=tmp_path, env=ranks,
        )  # fmt: skip
    assert ended.code == 2
    assert f"at port {port}" in _paragraph(ended.err)
    assert "--master_port" in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"not all of the 2 ranks came within engine.timeout=0.02"):
        RUNTIMES["deepspeed"](timeout=0.02)


def test_print_config_refuses_what_a_run_would(capsys: pytest.CaptureFixture[str]) -> None:
    for bad in ("stem=lnear", "stem.nrm=ln", "mask.num_maskd=3", "mask.num_masked=64"):
        assert main(["pretrain", "--print-config", bad]) == 2
        assert capsys.readouterr().out == ""


def test_a_stage_that_plain_pytorch_would_ignore(tiny: list[str]) -> None:
    config = load_config(ROOT / "configs" / "default.yaml", [*tiny, "engine.zero_stage=3"])
    with pytest.raises(UserError, match=r"engine\.zero_stage=3 would be ignored"):
        deepspeed_file(config.engine.model_copy(update={"runtime": "local"}))


FULL = """
import resource, sys
sys.path.insert(0, sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
from mimkit.cli import main
sys.exit(main(["pretrain", *sys.argv[1:]]))
"""


def test_a_full_disk(tiny: list[str], tmp_path: Path) -> None:
    """No file may exceed 300 kB, so the first checkpoint does not fit; indexes and lines do."""
    words = ["-c", FULL, str(ROOT), *tiny, f"output.dir={tmp_path / 'run'}"]
    ended = command(words, cwd=tmp_path)
    assert ended.code == 2, ended.err
    said = _paragraph(ended.err)
    assert f"cannot write {tmp_path / 'run' / 'checkpoints' / 'step-00000002'}" in said
    assert "Free some space" in said
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert not (tmp_path / "run" / "summary.json").exists()


def test_another_rank_lets_rank_0_speak_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Leaving at once, it would make the launcher end rank 0 before that has said anything."""
    for rank, waits in (("0", 0), ("1", 1)):
        waited: list[float] = []
        monkeypatch.setattr("mimkit.cli.time.sleep", waited.append)
        monkeypatch.setattr("mimkit.cli._ranks_have_met", lambda: False)
        monkeypatch.setenv("RANK", rank)
        assert main(["pretrain", "--print-config", "stem=lnear"]) == 2
        assert len(waited) == waits and all(seconds >= 10 for seconds in waited)
        assert "there is no stem called 'lnear'" in capsys.readouterr().err


def _set_with_one_bad_image(shards: Shards, folder: Path) -> Path:
    """Only one of two ranks draws it."""
    source = ShardSource(shards=str(shards.train))
    samples = [source[i] for i in range(len(source))]
    bad = b"\xff\xd8\xff\xe0 no picture"
    items = [Item(s.key, s.image if s.index != 5 else bad, "jpg", s.label) for s in samples]
    folder.mkdir()
    write_shard(folder / "train-00000.tar", items, split="train")
    return folder


_OF_BOTH = ("data.train=", "data.heldout=", "data.image_size=", "data.cache_dir=")


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before they meet", "when they have met", "in training"])
def test_two_ranks_end_and_one_of_them_speaks(
    when: str, tiny: list[str], shards: Shards, tmp_path: Path
) -> None:
    (tmp_path / "text.safetensors").write_text("<!DOCTYPE html>")
    bad = _set_with_one_bad_image(shards, tmp_path / "bad")
    pretraining = [str(ROOT / "tools" / "pretrain.py"), *tiny, "train.steps=12"]
    finetuning = [str(ROOT / "tools" / "finetune.py"), "init=null", "stem=linear",
                  "encoder.size=Ti", "encoder.patch_size=8", "train.batch_size=8",
                  *(word for word in tiny if word.startswith(_OF_BOTH))]  # fmt: skip
    words, message = {
        "before they meet": ([*pretraining, f"tokenizer.path={tmp_path / 'text.safetensors'}"],
                             "is text, not"),
        "when they have met": ([*finetuning, "model.classes=5"], "names 4 classes"),
        "in training": ([*pretraining, f"data.train={bad}"], "key 'train_005'"),
    }[when]  # fmt: skip
    launcher = ("-m", "deepspeed.launcher.runner", "--num_accelerators=2", "--master_port=29741")
    ended = command([*launcher, *words, "engine.runtime=deepspeed"], cwd=tmp_path)
    said = " ".join((ended.out + ended.err).split())
    assert ended.code != 0
    assert ended.seconds < 100, "a launcher ends its ranks 30 s later; the machine may be busy"
    assert said.count(message) == 1, said
    assert "Traceback" not in said
    assert list(tmp_path.rglob("summary.json")) == []
