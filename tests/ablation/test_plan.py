"""Which runs a study has, what they are called, and which comparisons it refuses."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from commands import ROOT

from mimkit import build
from mimkit.ablation.classifiers import CLASSIFIERS, classifier_config
from mimkit.ablation.confounds import check_confounds
from mimkit.ablation.jobs import as_planned
from mimkit.ablation.pairing import check_pairing
from mimkit.ablation.plan import Plan, arm_configs, make_plan
from mimkit.ablation.published import TABLE_7, published
from mimkit.audit.cost import cost
from mimkit.audit.leak import leaks_of_run
from mimkit.cli import main
from mimkit.config import load_study_config, science_of
from mimkit.errors import UserError

SHIPPED = sorted((ROOT / "configs" / "stems").glob("*.yaml"))


def _plan(path: Path, *overrides: str) -> Plan:
    return make_plan(load_study_config(path, overrides))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_study_has_arms_that_differ_in_what_they_say(path: Path) -> None:
    study = load_study_config(path)
    arms = arm_configs(study, seed=study.seeds[0])
    assert check_confounds(study, arms).keys() == arms.keys()
    for arm in study.present_arms.values():
        assert arm.paper is None or published(arm.paper)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_arm_of_a_shipped_study_is_taken_by_the_audit_at_the_start_of_a_run(
    path: Path,
) -> None:
    """The damaged one of the self-test too, that reads its patches from all over the image."""
    study = load_study_config(path)
    stems = {}
    for config in arm_configs(study, seed=0).values():
        small = config.model_copy(update={"encoder": config.encoder.model_copy(
            update={"size": "Ti", "depth": 1})})  # fmt: skip
        stems[config.stem.model_dump_json()] = small
    for config in stems.values():
        model = build.build_model(config, prediction_dim=2)
        mask = build.build_mask(config, model.stem.grid(*[config.data.image_size] * 2))
        leaks_of_run(model.stem, model.mask_at, mask, name=config.stem.name, placement="")


def test_the_default_study_is_table_7_and_xiaos_stem() -> None:
    study = load_study_config(ROOT / "configs" / "stems" / "study.yaml")
    rows = [arm.paper for arm in study.present_arms.values()]
    assert sorted(filter(None, rows)) == sorted(TABLE_7)
    assert [name for name, arm in study.present_arms.items() if not arm.paper] == ["conv"]


@pytest.mark.parametrize("row", sorted(TABLE_7))
def test_the_default_study_costs_what_table_7_says(row: str) -> None:
    """The paper does not say how its local transformer is built: there 0.2 % are allowed."""
    study = load_study_config(ROOT / "configs" / "stems" / "study.yaml")
    arms = arm_configs(study, seed=0)
    [name] = [name for name, arm in study.present_arms.items() if arm.paper == row]
    with torch.device("meta"):
        model = build.build_model(arms[name], prediction_dim=2).image_encoder
    counted = cost(model, stem=name, name=name).gflops_paper
    allowed = 2e-3 if row == "local transformer" else 3e-4
    assert counted == pytest.approx(TABLE_7[row].gflops, rel=allowed)


def test_the_default_study_finetunes_with_beits_recipe() -> None:
    study = load_study_config(ROOT / "configs" / "stems" / "study.yaml")
    assert study.finetuning is not None
    assert (study.finetuning.base, study.finetuning.settings) == ("finetune_beit_base", {})


def test_an_identity_is_of_everything_that_matters_and_of_nothing_else(tiny_study: Path) -> None:
    plan = _plan(tiny_study)
    names = {(run.arm, run.seed): run.identity for run in plan.runs}
    assert len(set(names.values())) == len(plan.runs) == 6
    assert [run.seed for run in plan.runs] == [0, 0, 0, 1, 1, 1], "whole pairs come first"

    def identities(*overrides: str) -> dict[tuple[str, int], str]:
        return {(run.arm, run.seed): run.identity for run in _plan(tiny_study, *overrides).runs}

    more = identities("seeds=[0,1,2]", "arms.bn={settings: {stem: {name: linear_bn}}}")
    assert names.items() <= more.items(), "what is finished is used again"
    assert identities("settings.output.log_every=3") == names
    assert not set(identities("settings.train.lr=1e-2").values()) & set(names.values())
    renamed = identities("arms.hmlp=null", "arms.other={settings: {stem: {name: hmlp}}}")
    assert renamed["other", 1] == names["hmlp", 1]


def test_the_code_of_a_users_own_stem_belongs_to_a_runs_identity(
    tiny_study: Path, own_stem: Callable[[int], str]
) -> None:
    """And to the folder of a supervised training; ours keep the identity that they always had."""

    def found(scale: int) -> tuple[dict[str, str], dict[str, str]]:
        plan = _plan(tiny_study, f"arms.hmlp.settings.stem.name={own_stem(scale)}", "seeds=[0]",
                     "regimes=[supervised]", "primary=supervised",
                     "supervised={base: finetune_small}")  # fmt: skip
        folders = {run.arm: str(classifier_config(plan.study, run, "supervised").output.dir)
                   for run in plan.runs}  # fmt: skip
        assert set(plan.of("hmlp")[0].code) == {f"code of {plan.arms['hmlp'].stem.name}"}
        return {run.arm: run.identity for run in plan.runs}, folders

    once, edited, again = (found(scale) for scale in (1, 2, 1))
    assert once == again
    for before, after in zip(once, edited, strict=True):
        assert {arm for arm in before if before[arm] != after[arm]} == {"hmlp"}
    plan = _plan(tiny_study)
    for run in plan.runs:
        text = json.dumps([science_of(run.config), plan.facts], sort_keys=True)
        assert run.identity == hashlib.sha256(text.encode()).hexdigest()[:12]


def test_a_stem_that_is_edited_while_its_study_runs_trains_no_run_of_the_old_code(
    tiny_study: Path, own_stem: Callable[[int], str]
) -> None:
    """Each run is a process of its own, that reads the file anew."""
    plan = _plan(tiny_study, f"arms.hmlp.settings.stem.name={own_stem(1)}")
    made: dict[str, object] = {}
    for run in plan.runs:
        as_planned(run, made.update, {run.identity: run.arm})
    assert len(made) == len(plan.runs)
    own_stem(2)
    with pytest.raises(UserError, match=r"edited since the study began: code of .*mine.py:Mine: '"):
        as_planned(plan.of("hmlp")[0], made.clear, {})
    as_planned(plan.of("linear")[0], made.clear, {})
    assert not made


def test_a_hidden_difference_is_refused_by_name(tiny_study: Path) -> None:
    with pytest.raises(UserError, match=r"arm 'hmlp'.*train\.batch_size: 8 -> 16.*declares="):
        _plan(tiny_study, "arms.hmlp.settings.train.batch_size=16")
    with pytest.raises(UserError, match=r"arm 'two_blocks'.*encoder\.depth: 1 -> 2"):
        _plan(tiny_study, "arms.two_blocks.declares=[]")
    declared = _plan(tiny_study, "arms.hmlp.settings.train.batch_size=16",
                     "arms.hmlp.declares=[train.batch_size]")  # fmt: skip
    assert declared.confounds["hmlp"] == ["train.batch_size: 8 -> 16"]
    assert declared.confounds["two_blocks"] == ["encoder.depth: 1 -> 2"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("arms.hmlp.declares=[mask]", "declares mask, which does not differ"),
        ("arms.same={settings: {stem: {name: linear}}}", "'linear' and 'same' are the same runs"),
        ("arms.hmlp.settings.stem.norn=ln", r"arm 'hmlp': .*norn"),
        ("arms.hmlp.settings.train.stepz=3", r"arm 'hmlp': .*train\.stepz"),
        ("pretraining=nowhere", "pretraining is 'nowhere'"),
        ("probes.knn.neigbours=[5]", "takes no setting 'neigbours'. Did you mean 'neighbours'"),
    ],
)
def test_a_wrong_study_is_refused_before_anything_runs(
    override: str, message: str, tiny_study: Path
) -> None:
    with pytest.raises(UserError, match=message):
        _plan(tiny_study, override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reference=none", "reference is 'none', which is no arm"),
        ("control=linear", "control and reference are both"),
        ("primary=finetuning", "primary is finetuning, which this study does not measure"),
        ("regimes=[probes,finetuning]", "the section finetuning is missing; give it a base"),
        ("finetuning={base: finetune_small}", "set finetuning=null, or name it in regimes"),
        ("probes.knn.name=linear", "a study sets name (it is knn)"),
        ("probes.knn=null", "regimes names probes, but there are none"),
        ("probe_images=[10,0]", "probe_images: Input should be greater than or equal to 1"),
        ("seeds=[1,1]", "each once"),
        ("sedes=[1]", "there is no setting 'sedes'. Did you mean 'seeds'?"),
    ],
)
def test_a_wrong_setting_of_a_study_names_itself(
    override: str, message: str, tiny_study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ablate_stems", "--config", str(tiny_study), "--print-config", override]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--self-test --preset quick", "leave --preset quick out"),
        ("--self-test --config {study}", "--self-test is a study of its own"),
        ("--self-test --dry-run", "--dry-run and --self-test ask for different things"),
        ("--dry-run --report", "--dry-run and --report ask for different things"),
        ("--preset quick --config {study}", "both name a study"),
        ("--compare a b seeds=[0]", "leave seeds=[0] out"),
        ("--compare a b --preset quick", "leave --preset quick out"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(
    words: str, message: str, tiny_study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ablate_stems", *words.format(study=tiny_study).split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("seed=9", "seeds of the study say it"),
        ("name=mine", "the arm's name and seed are in its folder's"),
        ("output.dir=elsewhere", "folder of the study says where"),
        ("output.runs_dir=elsewhere", "folder of the study says where"),
        ("engine.token_bank=elsewhere", "it fills banks of its own"),
    ],
)
@pytest.mark.parametrize(
    "where",
    ["settings", "arms.hmlp.settings", "arms.hmlp.classifier", "finetuning.settings",
     "supervised.settings"],
)  # fmt: skip
def test_what_a_study_sets_itself_is_refused_in_settings(
    where: str, override: str, instead: str, tiny_study: Path
) -> None:
    """It was accepted, and had no effect."""
    words = ["regimes=[finetuning,supervised]", "primary=finetuning",
             "finetuning={base: finetune_small}", "supervised={base: finetune_small}"]  # fmt: skip
    load_study_config(tiny_study, words)
    with pytest.raises(UserError) as caught:
        load_study_config(tiny_study, [*words, f"{where}.{override}"])
    key = override.partition("=")[0]
    assert f"{where}: a study sets {key} ({instead}" in str(caught.value)


def test_an_arm_brings_its_stem_to_its_classifier_and_a_budget_its_length(
    tiny_study: Path,
) -> None:
    supervised = ["regimes=[supervised]", "primary=supervised"]
    for key in ("stem.name=levit", "encoder.depth=2", "init=elsewhere"):
        with pytest.raises(UserError, match=rf"supervised\.settings: a study sets {key[:4]}"):
            load_study_config(tiny_study, [*supervised, "supervised.base=finetune_small",
                                           f"supervised.settings.{key}"])  # fmt: skip
    long = "arms.hmlp.settings.train.steps=400"
    load_study_config(tiny_study, ["budget=flops", "arms.linear.settings.train.steps=400"])
    with pytest.raises(
        UserError, match=r"arms\.hmlp\.settings gives train\.steps, but budget=flops"
    ):
        load_study_config(tiny_study, ["budget=flops", long])


def test_null_takes_a_probe_away_that_a_base_has(tiny_study: Path) -> None:
    with_linear = load_study_config(tiny_study, ["probes.linear={}"])
    assert with_linear.measures == ["knn", "linear"]
    taken = load_study_config(tiny_study, ["probes.linear={}", "probes.knn=null", "primary=linear"])
    assert taken.measures == ["linear"]


def test_arms_are_paired_in_all_that_they_see(tiny_study: Path) -> None:
    plan = _plan(tiny_study)
    nothing: dict[str, list[str]] = {arm: [] for arm in plan.arms}
    pairs = check_pairing(plan.arms, reference="linear", allowed=nothing)
    found = {one.arm: one for one in pairs}
    everything = ["order", "crops", "masks", "tokens", "grid", "batches"]
    assert [one.equal for one in found.values()] == [everything, everything]
    hmlp, deeper = found["hmlp"], found["two_blocks"]
    assert hmlp.weights_equal == hmlp.weights_alike > 10
    assert all(name.startswith("stem.") for name in hmlp.weights_other)
    assert deeper.weights_equal == deeper.weights_alike
    assert all(name.startswith("encoder.blocks.1.") for name in deeper.weights_other)


@pytest.fixture
def other_seed(tiny_study: Path) -> Iterator[Plan]:
    yield _plan(tiny_study, "seeds=[5]")


def test_arms_that_see_other_images_or_weights_are_found_out(
    tiny_study: Path, other_seed: Plan
) -> None:
    """As a part would that drew from a generator of its own."""
    arms = {"linear": _plan(tiny_study).arms["linear"], "hmlp": other_seed.arms["hmlp"]}
    with pytest.raises(UserError, match=r"is not paired with 'linear': order: .*crops: .*masks: "):
        check_pairing(arms, reference="linear", allowed={"linear": [], "hmlp": []})
    seen = ["order", "crops", "masks", "tokens"]
    with pytest.raises(UserError, match=r"but only .* are equal"):
        check_pairing(arms, reference="linear", allowed={"linear": [], "hmlp": seen})


def test_an_arm_whose_stem_breaks_its_contract_is_named(tiny_study: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "from mimkit.models.stems.linear import Linear\n"
        "class Turned(Linear):\n"
        "    def forward(self, image_BCHW, mask_BN=None):\n"
        "        return super().forward(image_BCHW, mask_BN).transpose(1, 2)\n"
    )
    plan = _plan(tiny_study, f"arms.hmlp.settings.stem.name={tmp_path}/bad.py:Turned")
    with pytest.raises(UserError, match=r"arm 'hmlp': stem '.*bad\.py:Turned': forward"):
        check_pairing(plan.arms, reference="linear", allowed={arm: [] for arm in plan.arms})


def test_a_row_that_the_papers_table_has_not_is_refused_before_anything_is_trained(
    tiny_study: Path,
) -> None:
    with pytest.raises(UserError, match=r"arms\.hmlp\.paper: .*no row 'hmlp_bn'.*Rows: .*hMLP BN"):
        _plan(tiny_study, "arms.hmlp.paper=hmlp_bn")


def test_classifiers_start_where_their_arm_says_on_the_data_of_its_pretraining(
    tiny_study: Path,
) -> None:
    plan = _plan(tiny_study, "regimes=[finetuning,supervised]", "primary=finetuning",
                 "finetuning={base: finetune_small}", "supervised={base: finetune_small}",
                 "arms.hmlp.classifier.train.roles=[attention]")  # fmt: skip
    folders = set()
    for run in plan.runs:
        tuned, scratch = (classifier_config(plan.study, run, regime) for regime in CLASSIFIERS)
        assert (tuned.init, tuned.seed) == (str(run.folder), run.seed)
        assert tuned.stem is None and scratch.init is None
        assert scratch.stem == run.config.stem
        assert scratch.encoder is not None and scratch.encoder.depth == run.config.encoder.depth
        for one in (tuned, scratch):
            assert (one.data.train, one.data.image_size) == (run.config.data.train, 32)
            assert one.train.roles == (["attention"] if run.arm == "hmlp" else ["all"])
            folders.add(one.output.dir)
    assert len(folders) == 2 * len(plan.runs)
    assert "classifier.train: None -> {'roles': ['attention']}" in plan.confounds["hmlp"]
