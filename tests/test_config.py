"""Settings: unknown ones are answered, none is without effect, and the resolved form loads back."""

import ast
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT
from pydantic import BaseModel

from mimkit.build import check_parts
from mimkit.cli._arguments import find_config
from mimkit.config import (
    Config,
    DvaeConfig,
    EncoderConfig,
    FinetuneConfig,
    PartConfig,
    Section,
    ShardSet,
    TokenizerConfig,
    VqkdConfig,
    differences,
    load_config,
    load_finetune_config,
    load_tokenizer_config,
    science_hash,
    science_of,
    to_yaml,
)
from mimkit.errors import UserError

SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
DEFAULT = ROOT / "configs" / "default.yaml"


def _write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def _load_any(path: Path) -> Config | TokenizerConfig | FinetuneConfig:
    """A tokenizer's has a section `objective`, a finetuning's begins with an encoder."""
    text = path.read_text()
    if "\ninit:" in text or "finetune.py" in text:
        return load_finetune_config(path)
    return load_tokenizer_config(path) if "objective:" in text else load_config(path)


_TOOLS = {FinetuneConfig: "finetune", Config: "pretrain"}


def _leaves(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_shipped_configurations_load_and_their_first_line_is_a_command(path: Path) -> None:
    config = _load_any(path)
    assert path.read_text().startswith("# command:")
    tool = _TOOLS.get(type(config), "train_tokenizer")
    assert f"tools/{tool}.py" in path.read_text().splitlines()[0]
    assert find_config(path.stem) == find_config(path.name) == path


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_the_resolved_configuration_loads_back_to_the_same(path: Path, tmp_path: Path) -> None:
    config = _load_any(path)
    again = _load_any(_write(tmp_path, "again.yaml", to_yaml(config)))
    assert again == config
    assert science_hash(again) == science_hash(config)
    assert to_yaml(again) == to_yaml(config)


def test_what_is_wrong_comes_first_and_the_other_settings_are_not_repeated() -> None:
    words = ["train.steps=0", "data.train=somewhere", "train.lr=1e-3"]
    with pytest.raises(UserError) as caught:
        load_config(DEFAULT, words)
    said = str(caught.value)
    assert said.startswith("train.steps: ") and "somewhere" not in said
    assert said.endswith(f"(in {DEFAULT} and 3 settings over it)")


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("train.lrr=1", "there is no setting 'train.lrr'. Did you mean 'train.lr'?"),
        ("trian.lr=1", "there is no setting 'trian'. Did you mean 'train'?"),
        (
            "data.imagesize=1",
            "there is no setting 'data.imagesize'. Did you mean 'data.image_size'?",
        ),
        ("zero_stage=1", "Did you mean 'engine.zero_stage'?"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(override: str, near: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(DEFAULT, [override])
    assert near in str(caught.value)


def test_all_wrong_keys_are_named_at_once() -> None:
    with pytest.raises(UserError) as caught:
        load_config(DEFAULT, ["train.a=1", "engine.b=1", "train.lr=-1"])
    for part in ("no setting 'train.a'", "no setting 'engine.b'", "train.lr: ", "(given: -1)"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr", "is not an override; write key=value"),
        ("=1", "is not an override"),
        ("train.lr=[1", "not valid YAML"),
        ("train.lr=quick", "train.lr: Input should be a valid number"),
        ("train.lr=inf", "finite"),
        ("train.lr=.nan", "train.lr: "),
        ("train.lr=0", "greater than 0"),
        ("train.lr.x=0", "train.lr: "),
        ("train.betas=[0.9, 1.5]", "train.betas: Input should be less than 1"),
        ("train.epochs=2", "exactly one of train.steps and train.epochs"),
        ("train.steps=null", "exactly one of train.steps and train.epochs"),
        ("data.std=[0, 1, 1]", "data.std: Input should be greater than 0"),
        ("data.crop_scale=[1.0, 0.2]", "crop_scale is [1, 0.2]; expected 0 < smallest"),
        (
            "data.crop_scale=[0.5, 2]",
            "expected 0 < smallest <= largest <= 1",
        ),
        ("data.crop_ratio=[0, 2]", "crop_ratio is [0, 2]"),
        ("data.exif=maybe", "'ignore' or 'honour'"),
        ("encoder.size=XL", "encoder.size"),
        ("engine=null", "engine"),
        ("stem=null", "stem.name"),
        ("seed=18446744073709551616", "seed: Input should be less than"),
        ("name=../elsewhere", "name: "),
        ("train.clip_grad=null", "train.clip_grad: 0 turns clipping off"),
    ],
)
def test_a_value_out_of_range_is_named_with_its_key(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(DEFAULT, [override])
    assert message in str(caught.value)
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {steps: 1}\ntrain: {steps: 2}\n", "given twice: train"),
        ("train:\n  steps: 1\n  steps: 2\n", "given twice: steps"),
        ("- a\n- b\n", "holds list"),
        ("", "holds NoneType"),
        ("train: {steps: 1", "not valid YAML"),
        ("train: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
        ("base: nowhere.yaml\n", "nowhere.yaml: No such file"),
    ],
)
def test_a_bad_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_config(_write(tmp_path, "bad.yaml", text))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_what_is_no_text_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    for path in (tmp_path / "binary.yaml", tmp_path, tmp_path / "missing.yaml"):
        with pytest.raises(UserError, match=f"cannot read the configuration {path}"):
            load_config(path)


def test_a_name_that_is_neither_file_nor_shipped_lists_the_shipped_ones() -> None:
    with pytest.raises(UserError) as caught:
        find_config("defualt")
    assert all(path.stem in str(caught.value) for path in SHIPPED)


def test_bases_are_laid_under_one_another_and_relative_to_their_file(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    _write(tmp_path, "a.yaml", "train: {steps: 5, lr: 1.0e-3}\nseed: 1\nname: a\n")
    _write(tmp_path / "sub", "b.yaml", "base: ../a.yaml\ntrain: {lr: 2.0e-3}\nseed: 2\n")
    top = _write(tmp_path, "c.yaml", "base: sub/b.yaml\nseed: 3\n")
    config = load_config(top, ["train.batch_size=16"])
    assert (config.name, config.seed) == ("a", 3)
    assert (config.train.steps, config.train.lr, config.train.batch_size) == (5, 2e-3, 16)


def test_a_circle_of_bases_is_refused(tmp_path: Path) -> None:
    first = _write(tmp_path, "a.yaml", "base: b.yaml\n")
    _write(tmp_path, "b.yaml", "base: a.yaml\n")
    with pytest.raises(UserError, match=r"a\.yaml names itself as its base, by way of .*b\.yaml"):
        load_config(first)


def test_another_part_keeps_nothing_of_the_one_before(tmp_path: Path) -> None:
    base = _write(tmp_path, "a.yaml", "train: {steps: 1}\nstem: {name: hmlp, norm: ln}\n")
    over = _write(tmp_path, "b.yaml", "base: a.yaml\nstem: {name: linear}\n")
    assert load_config(base).stem.settings == {"norm": "ln"}
    assert load_config(base, ["stem=linear"]).stem == PartConfig(name="linear")
    assert load_config(base, ["stem.name=linear"]).stem.settings == {}
    assert load_config(base, ["stem=hmlp"]).stem.settings == {"norm": "ln"}
    assert load_config(base, ["stem.norm=bn"]).stem == PartConfig(name="hmlp", norm="bn")
    assert load_config(over).stem == PartConfig(name="linear")
    both = load_config(base, ["mask=random", "mask.num_masked=7"]).mask
    assert both == PartConfig(name="random", num_masked=7)
    assert load_config(base, ["mask.num_masked=7", "mask=random"]).mask == both


def test_overrides_are_yaml_and_the_last_one_wins() -> None:
    config = load_config(
        DEFAULT,
        ["train.lr=1e-3", "data.train=[a.tar, b.tar]", "train.lr=3e-4", "data.heldout=null",
         "output.tensorboard=false", "encoder.layer_scale=1e-5"],
    )  # fmt: skip
    assert config.train.lr == 3e-4
    assert config.data.train == ["a.tar", "b.tar"]
    assert config.data.heldout is None
    assert config.output.tensorboard is False
    assert config.encoder.layer_scale == 1e-5
    assert (
        load_config(DEFAULT, ["data.train=x-{0000..0012}.tar"]).data.train == "x-{0000..0012}.tar"
    )
    assert load_config(DEFAULT, ["data.train=*.tar"]).data.train == "*.tar"


def test_what_a_shell_makes_of_braces_is_refused() -> None:
    words = ["data.train=x-0.tar", "data.train=x-1.tar"]  # data.train=x-{0..1}.tar without quotes
    with pytest.raises(UserError, match=r"data\.train is given twice in a row.*quote"):
        load_config(DEFAULT, words)


def test_a_base_is_a_file_beside_or_the_name_of_a_shipped_one(tmp_path: Path) -> None:
    shipped = load_config(DEFAULT)
    mine = tmp_path / "mine.yaml"
    for name in ("default", "default.yaml"):
        mine.write_text(f"base: {name}\ntrain: {{steps: 7}}\n", encoding="utf-8")
        config = load_config(mine)
        assert config.train.steps == 7
        assert config.encoder == shipped.encoder
    (tmp_path / "default.yaml").write_text("train: {steps: 9, lr: 0.5}\n", encoding="utf-8")
    assert load_config(mine).train.lr == 0.5  # the one beside comes first


def test_a_tokenizer_configuration_is_told_from_a_pretraining_one() -> None:
    with pytest.raises(UserError, match="train_tokenizer"):
        load_config(DEFAULT.with_name("tokenizer.yaml"))


def _other(value: Any) -> Any:
    """Another value of the same type, as plain as possible."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return "other"


FREE = {"data.cache_dir", "data.cache_gib", "data.max_bad_samples", "train.on_nonfinite",
        "train.max_nonfinite"}  # fmt: skip


def test_output_and_engine_do_not_enter_the_science_but_precision_and_all_else_do() -> None:
    config = load_config(DEFAULT)
    before, settings = science_hash(config), config.model_dump(mode="json")
    for key, value in _leaves(settings):
        section, _, field = key.rpartition(".")
        changed = copy.deepcopy(settings)
        (changed[section] if section else changed)[field] = _other(value)
        is_free = key.startswith(("output.", "engine.")) and key != "engine.precision"
        same = science_hash(_Settings(values=changed)) == before
        assert same == (is_free or key in FREE), key


class _Settings(BaseModel):
    """Stands for a configuration with any values, allowed or not."""

    values: dict[str, Any]

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return copy.deepcopy(self.values)


def test_the_hash_does_not_depend_on_how_a_number_was_written() -> None:
    one = load_config(DEFAULT, ["train.lr=1e-3", "train.warmup=0"])
    other = load_config(DEFAULT, ["train.lr=0.001", "train.warmup=0.0"])
    assert science_hash(one) == science_hash(other)


def test_a_newer_setting_that_is_off_leaves_older_runs_theirs() -> None:
    assert "view_seed" not in science_of(load_config(DEFAULT))["data"]
    assert science_of(load_config(DEFAULT, ["data.view_seed=0"]))["data"]["view_seed"] == 0


def test_differences_name_every_leaf_with_both_values() -> None:
    old = science_of(load_config(DEFAULT, ["stem.norm=bn", "seed=1"]))
    new = science_of(load_config(DEFAULT, ["stem=linear", "seed=2"]))
    assert differences(old, new) == [
        "seed: 1 -> 2", "stem.name: 'hmlp' -> 'linear'", "stem.norm: 'bn' -> None",
    ]  # fmt: skip
    assert differences(new, new) == []


def _fields(kind: type[BaseModel]) -> Iterator[tuple[str, str]]:
    for name, field in kind.model_fields.items():
        yield kind.__name__, name
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _fields(field.annotation)


READ = {
    node.attr
    for path in (ROOT / "mimkit").rglob("*.py")
    if path.name != "config.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.Attribute)
}
# Sections that are handed on whole, as keyword arguments: Python reports what is not taken.
WHOLE = {"DvaeModelConfig"}


@pytest.mark.parametrize(
    ("section", "field"), sorted({*_fields(Config), *_fields(DvaeConfig), *_fields(VqkdConfig),
                                  *_fields(ShardSet)})
)  # fmt: skip
def test_every_setting_is_read_somewhere(section: str, field: str) -> None:
    assert field in READ or section in WHOLE, f"nothing reads {section}.{field}"


def _encoder(*overrides: str, path: Path = DEFAULT) -> tuple[str, int | None, int]:
    encoder = load_config(path, overrides).encoder
    return encoder.size, encoder.depth, encoder.branches


@pytest.mark.parametrize(
    ("name", "size", "depth", "branches"),
    [("S36", "S", 36, 1), ("B18x2", "B", 18, 2), ("B12x3", "B", 12, 3), ("L12x2", "L", 12, 2),
     ("Ti24", "Ti", 24, 1), ("B18x1", "B", 18, 1), ("H32x10", "H", 32, 10)],
)  # fmt: skip
def test_a_name_is_size_depth_and_branches_and_the_same_run(name, size, depth, branches) -> None:
    assert _encoder(f"encoder.size={name}") == (size, depth, branches)
    written_out = [f"encoder.size={size}", f"encoder.depth={depth}", f"encoder.branches={branches}"]
    named, plain = load_config(DEFAULT, [f"encoder.size={name}"]), load_config(DEFAULT, written_out)
    assert named == plain
    assert science_hash(named) == science_hash(plain)
    assert EncoderConfig.model_validate({"size": name}).depth == depth
    assert _encoder(f"encoder.size={name}", *written_out[1:]) == (size, depth, branches)


def test_of_a_name_and_what_a_base_says_the_later_wins(tmp_path: Path) -> None:
    text = "train: {steps: 1}\nencoder: {size: Ti, depth: 4, branches: 3}\n"
    plain = _write(tmp_path, "a.yaml", text)
    named = _write(tmp_path, "b.yaml", "base: a.yaml\nencoder: {size: B18x2}\n")
    deeper = _write(tmp_path, "c.yaml", "base: b.yaml\nencoder: {depth: 12}\n")
    assert _encoder(path=plain) == ("Ti", 4, 3)
    assert _encoder("encoder.size=S36", path=plain) == ("S", 36, 1)
    assert _encoder("encoder.size=S", path=plain) == ("S", 4, 3)
    assert _encoder(path=named) == ("B", 18, 2)
    assert _encoder("encoder.size=L12x3", path=named) == ("L", 12, 3)
    assert _encoder("encoder.branches=1", path=named) == ("B", 18, 1)
    assert _encoder("encoder.size=L", path=named) == ("L", 18, 2)
    assert _encoder(path=deeper) == ("B", 12, 2)
    assert _encoder("encoder.size=S36", "encoder.depth=null", path=deeper) == ("S", 36, 1)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("depth=4", "encoder.size=S36x2 means encoder.depth=36, but encoder.depth is 4"),
        ("branches=1", "encoder.size=S36x2 means encoder.branches=2, but encoder.branches is 1"),
    ],
)
def test_a_name_and_a_setting_beside_it_that_differ_are_refused(
    setting: str, message: str, tmp_path: Path
) -> None:
    key, _, value = setting.partition("=")
    text = f"train: {{steps: 1}}\nencoder: {{size: S36x2, {key}: {value}}}\n"
    path = _write(tmp_path, "a.yaml", text)
    with pytest.raises(UserError) as in_a_file:
        load_config(path)
    with pytest.raises(UserError) as in_a_command:
        load_config(DEFAULT, ["encoder.size=S36x2", f"encoder.{setting}"])
    with pytest.raises(ValueError) as in_python:
        EncoderConfig.model_validate({"size": "S36x2", key: int(value)})
    for caught in (in_a_file, in_a_command, in_python):
        assert message in str(caught.value)
        assert f"leave encoder.{key} out, or set encoder.size=S" in str(caught.value)
    assert str(path) in str(in_a_file.value)


@pytest.mark.parametrize("name", ["B0", "b12", "B12x0", "Q12", "Bx2", "B12x", "B-1", "B\u0663"])
def test_a_misspelt_name_is_answered_with_the_form(name: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(DEFAULT, [f"encoder.size={name}"])
    for part in (f"encoder.size is '{name}'", "Ti, S, B, L, H", "S36", "B18x2"):
        assert part in str(caught.value)


def test_a_set_is_a_pattern_or_patterns_or_sets_with_weights(tmp_path: Path) -> None:
    sets = "[{shards: a, weight: 2}, {shards: [b, c], labels: false}]"
    written = _write(tmp_path, "a.yaml", f"base: default\ndata: {{train: {sets}}}\n")
    for config in (load_config(written), load_config(DEFAULT, [f"data.train={sets}"])):
        assert config.data.train == [
            ShardSet(shards="a", weight=2.0), ShardSet(shards=["b", "c"], labels=False),
        ]  # fmt: skip
        again = load_config(_write(tmp_path, "b.yaml", to_yaml(config)))
        assert again == config
        assert science_hash(again) == science_hash(config)
    weighted = load_config(DEFAULT, ["data.train=[{shards: a}, {shards: b, weight: 2}]"])
    plain = load_config(DEFAULT, ["data.train=[{shards: a}, {shards: b}]"])
    assert science_hash(weighted) != science_hash(plain)


@pytest.mark.parametrize(
    ("train", "messages"),
    [
        ("[{shards: a, wieght: 2}]", ["no setting 'data.train.wieght'", "'data.train.weight'?"]),
        ("[{shards: a, weight: 0}]", ["data.train.weight: Input should be greater than 0"]),
        ("[{shards: a, weight: .inf}]", ["data.train.weight: Input should be a finite number"]),
        ("[{weight: 2}]", ["data.train.shards: Field required"]),
        ("[{shards: a}, b]", ["data.train: ", "(given: 'b')"]),
        ("5", ["data.train: Input should be a valid string (given: 5)"]),
        ("{shards: a}", ["data.train: Input should be a valid string"]),
    ],
)
def test_a_set_that_is_none_gets_one_answer(train: str, messages: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_config(DEFAULT, [f"data.train={train}"])
    said = str(caught.value)
    assert all(message in said for message in messages)
    assert ";" not in said and "<" not in said


def test_a_subset_is_a_share_or_a_path() -> None:
    for text, value in (("0.01", 0.01), ("1e-2", 0.01), ("1", 1.0), ("keys.txt", "keys.txt"),
                        ("null", None)):  # fmt: skip
        subset = load_config(DEFAULT, [f"data.subset={text}"]).data.subset
        assert subset == value and type(subset) is type(value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.subset=0"], "data.subset is 0; expected a share of the images in (0, 1], or a"),
        (["data.subset=1.5"], "data.subset is 1.5; expected"),
        (["data.subset=-1"], "data.subset is -1; expected"),
        (["data.stratified=true"], "data.stratified does nothing where data.subset is not"),
        (["data.subset=keys.txt", "data.stratified=true"], "data.stratified does nothing"),
        (["data.subset_seed=1"], "data.subset_seed does nothing where data.subset is not"),
        (["data.heldout_fraction=0"], "data.heldout_fraction: Input should be greater than 0"),
        (["data.heldout_fraction=1"], "data.heldout_fraction: Input should be less than 1"),
        (
            ["data.heldout_fraction=0.1", "data.heldout=shards/val"],
            "data.heldout=shards/val names others; set one of them to null",
        ),
        (["data.max_bad_samples=1.5"], "data.max_bad_samples: Input should be less than or equal"),
    ],
)
def test_choices_of_data_that_contradict(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(DEFAULT, overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize("heldout", ["null", "embedded"])
def test_a_held_out_fraction_stands_beside_the_default(heldout: str) -> None:
    words = ["data.train=mine", "data.heldout_fraction=0.1", f"data.heldout={heldout}"]
    assert load_config(DEFAULT, words).data.heldout_fraction == 0.1


def test_a_setting_of_a_part_that_no_file_names_is_about_the_default_part() -> None:
    config = load_config(ROOT / "configs" / "default.yaml", ["mask_at.filler=mean"])
    assert (config.mask_at.name, config.mask_at.settings) == ("after_stem", {"filler": "mean"})
    with pytest.raises(UserError, match="mask_at 'after_stem' takes no setting 'filler'"):
        check_parts(config)
