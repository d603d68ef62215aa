"""The accounting table reproduces the paper's and the facts' numbers."""

import json

import pytest
import torch

from mimkit.audit.cost import cost
from mimkit.cli._audit.cost import _DEFAULT, _PAPER_GFLOPS, _PAPER_PARAMS
from mimkit.cli.audit import main
from mimkit.errors import UserError
from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.stems import STEMS


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The default table without timing: (stem, model) -> its row of the JSON."""
    path = tmp_path_factory.mktemp("cost") / "cost.json"
    assert main(["cost", "--rounds", "0", "--json", str(path)]) == 0
    return {(row["stem"], row["model"]): row for row in json.loads(path.read_text())}


@pytest.mark.parametrize(
    ("stem", "model", "gflops"),
    [("linear", "B12", 17.583), ("linear", "B13", 19.038), ("hmlp", "B12", 17.732),
     ("levit", "B12", 19.072)],
)  # fmt: skip
def test_gflops_by_the_papers_rule(table, stem: str, model: str, gflops: float) -> None:
    assert table[stem, model]["gflops_paper"] == pytest.approx(gflops, abs=0.0006)


@pytest.mark.parametrize(
    ("stem", "model", "params"),
    [("linear", "B12", 86_567_656), ("hmlp", "B12", 86_727_016), ("levit", "B12", 89_466_184),
     ("linear", "B13", 93_655_528), ("linear", "S12", 22_050_664), ("linear", "Ti12", 5_717_416),
     ("linear", "L24", 304_326_632)],
)  # fmt: skip
def test_parameters_of_the_facts(table, stem: str, model: str, params: int) -> None:
    assert table[stem, model]["params"] == params


def test_parallel_models_have_the_parameters_and_flops_of_sequential_ones(table) -> None:
    for wide, deep in (("B6x2", "B12"), ("B4x3", "B12"), ("S24x2", "S48"), ("B18x2", "B36")):
        for key in ("params", "gflops_paper", "gflops"):
            assert table["linear", wide][key] == table["linear", deep][key]


def test_published_figures_are_reproduced_save_the_two_that_are_named(table, capsys) -> None:
    """To the digits that the paper prints: 304.4 stands there for 304.327, and `local` is ours."""
    off = set()
    for published, key, unit in (
        (_PAPER_GFLOPS, "gflops_paper", 1),
        (_PAPER_PARAMS, "params", 1e6),
    ):
        for row, figure in published.items():
            digits = len(str(figure).partition(".")[2])
            if round(table[row][key] / unit, digits) != figure:
                off.add(row)
    assert off == {("local", "B12"), ("linear", "L24")}
    assert abs(table["local", "B12"]["gflops_paper"] - 19.12) < 0.05
    assert {(row.stem, row.model) for row in _DEFAULT} >= set(_PAPER_GFLOPS)


def test_kept_activations_are_those_of_a_real_forward() -> None:
    """The meta device counts what autograd keeps of real numbers."""
    stem = STEMS["hmlp"](width=64)
    model = ImageEncoder(stem, Encoder(width=64, heads=2, depth=2, grid=(4, 4), layer_scale=None))
    with torch.device("meta"):
        counted = cost(
            ImageEncoder(STEMS["hmlp"](width=64),
                         Encoder(width=64, heads=2, depth=2, grid=(4, 4), layer_scale=None)),
            stem="hmlp", name="tiny")  # fmt: skip
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        output = model.train()(torch.rand(2, 3, 64, 64))
    assert output.requires_grad
    assert counted.activations_mib == pytest.approx(sum(kept.values()) / 2 / 2**20, rel=0.02)


FIELDS = {"stem", "model", "params", "gflops_paper", "gflops", "ms_forward", "ms_train"}


def test_it_says_what_it_compared_with_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in ((["--stem", "conv", "--size", "Ti"], "The paper has no figures for these"),
                        (["--stem", "linear", "--size", "B"], "(2 figures) is reproduced"),
                        (["--stem", "linear", "--size", "L24"], "paper has 304.4")):  # fmt: skip
        assert main(["cost", "--rounds", "0", *words]) == 0
        assert said in capsys.readouterr().out


def test_the_command_times_and_explains(tmp_path, capsys) -> None:
    assert main(["cost", "--stem", "linear", "hmlp:norm=ln", "--size", "Ti2", "Ti1x2", "--image",
                 "64", "--rounds", "1", "--json", str(tmp_path / "c.json")]) == 0  # fmt: skip
    assert "multiply-adds counted once" in capsys.readouterr().out
    rows = json.loads((tmp_path / "c.json").read_text())
    assert [(row["stem"], row["model"]) for row in rows] == [
        ("linear", "Ti2"), ("hmlp:norm=ln", "Ti2"), ("linear", "Ti1x2"), ("hmlp:norm=ln", "Ti1x2"),
    ]  # fmt: skip
    for row in rows:
        assert set(row) >= FIELDS
        assert row["ms_train"] > row["ms_forward"] > 0
        assert 0 < row["stem_time_share"] < 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "Q12"], "--size Q12: .*B18x2"),
        (["--stem", "hmpl"], "Did you mean 'hmlp'"),
        (["--image", "100"], "set --image to a multiple of 16"),
        (["--rounds", "-1"], "--rounds is -1"),
        (["--image", "-224"], "--image is -224"),
        (["--patch", "0"], "--patch is 0; set it to a number from 1 to 256"),
        (["--stem", "levit", "--patch", "14", "--image", "224"], "no patches of 14"),
    ],
)
def test_bad_input_is_named(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(["cost", *words])
