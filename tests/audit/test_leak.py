"""The leak audit finds what facts 1.8 and the anchors say, and the command says it."""

import json

import pytest
import torch

from mimkit.audit.leak import block_mask, leaks, leaks_of_run, measured_reach, noise, say
from mimkit.cli.audit import main
from mimkit.errors import UserError
from mimkit.masks import MASKS
from mimkit.models.init import initialise_stem
from mimkit.models.mask_at import MASK_AT
from mimkit.models.stems import STEMS

GRID = (14, 14)


def stem_of(name: str, **settings):
    stem = STEMS[name](width=64, **settings)
    initialise_stem(stem, seed=0)
    return stem


@pytest.fixture(scope="module")
def found() -> dict:
    """(stem, placement, mode, bn) -> Leak, for every registered stem and placement; hmlp LN too."""
    image_BCHW, other_BCHW = noise(8, side=224).chunk(2)
    mask_BN = block_mask(GRID, batch=4)
    measured = {}
    stems = {name: stem_of(name) for name in STEMS} | {"hmlp ln": stem_of("hmlp", norm="ln")}
    for name, stem in stems.items():
        for placement in MASK_AT:
            given = {"name": name, "placement": placement, "mask_BN": mask_BN}
            for leak in leaks(
                stem, MASK_AT[placement](), image_BCHW=image_BCHW, other_BCHW=other_BCHW, **given
            ):
                measured[name, placement, leak.mode, leak.bn] = leak
    return measured


def test_patchwise_stems_leak_by_batch_statistics_only(found) -> None:
    for (name, placement, _, bn), leak in found.items():
        if leak.reach_declared == 0 and (bn != "all" or placement == "before_stem"):
            assert leak.visible_moved == leak.max_relative == leak.farthest == 0, leak
        if leak.reach_declared == 0 and bn == "all" and placement != "before_stem":
            assert leak.visible_moved == 1, name
            assert 0.015 < leak.mean_relative < 0.05, name  # facts: 2-3 % for hmlp


def test_block_of_36_moves_8_percent_of_the_visible_tokens_of_levit_and_conv(found) -> None:
    """13 of 160: the row below, the column to the right, their corner; levit's by up to 118 %."""
    for name in ("levit", "conv", "local"):
        bn = None if name == "local" else "running"
        leak = found[name, "after_stem", "eval", bn]
        assert leak.hidden == pytest.approx(36 / 196)
        assert leak.visible_moved == pytest.approx(13 / 160)
        assert leak.farthest == 1
    assert found["levit", "after_stem", "eval", "running"].max_relative == pytest.approx(
        1.18, abs=0.3
    )


def test_other_placements_end_the_leak_of_overlap(found) -> None:
    for (_, placement, _, bn), leak in found.items():
        if placement == "before_stem" or (placement == "dilated" and bn != "all"):
            assert leak.visible_moved == 0, leak
    assert found["levit", "dilated", "eval", "running"].hidden == pytest.approx(49 / 196)


def test_the_measured_reach_is_the_declared_one(found) -> None:
    assert all(leak.reach_measured == leak.reach_declared for leak in found.values())
    assert measured_reach(stem_of("conv", plan="18gf")) == stem_of("conv", plan="18gf").reach == 27


def test_the_audit_leaves_the_stem_as_it_was() -> None:
    stem = stem_of("hmlp").train()
    before = {name: value.clone() for name, value in stem.state_dict().items()}
    mask = MASKS["blockwise"](grid=(4, 6), num_masked=9)
    measured = leaks_of_run(
        stem, MASK_AT["after_stem"](), mask, name="hmlp", placement="after_stem"
    )
    assert all(torch.equal(before[name], value) for name, value in stem.state_dict().items())
    assert [(leak.mode, leak.bn) for leak in measured] == [("eval", "running"), ("train", "all")]
    assert stem.training
    text = say(measured)
    assert "in eval mode (running statistics): no visible token" in text
    assert "in training (batch statistics of all patches): 100.0% of the visible tokens" in text


def test_a_stem_that_lies_about_its_reach_is_found_out() -> None:
    class Liar(type(stem_of("levit"))):
        reach_sides = (0, 0)

        def _by_rows(self, image_BCHW, mask_BN):
            grid = self.grid(*image_BCHW.shape[2:])
            return self._by_maps(image_BCHW, mask_BN, grid).flatten(2).transpose(1, 2)

    stem = Liar(width=64)
    initialise_stem(stem, seed=0)
    assert (stem.reach, measured_reach(stem)) == (0, 15)


FIELDS = {"stem", "mask_at", "mode", "bn", "visible_moved", "mean_relative", "max_relative",
          "reach_declared", "reach_measured"}  # fmt: skip


def test_the_command_writes_table_numbers_and_pictures(tmp_path, capsys) -> None:
    assert main(
        ["leak", "--stem", "hmlp", "levit:norm=ln", "--mask-at", "after_stem",
         "before_stem:filler=mean", "--width", "64", "--image", "112", "--json",
         str(tmp_path / "leak.json"), "--picture", str(tmp_path / "pictures")]
    ) == 0  # fmt: skip
    assert "levit:norm=ln" in capsys.readouterr().out
    rows = json.loads((tmp_path / "leak.json").read_text())
    assert all(set(row) >= FIELDS for row in rows)
    modes = [(row["stem"], row["mask_at"], row["mode"], row["bn"]) for row in rows]
    assert ("hmlp", "before_stem:filler=mean", "train", "visible") in modes
    assert len(modes) == len(set(modes)) == 2 * 4 + 2 * 2
    pictures = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert pictures == ["reach-hmlp.png", "reach-levit-norm=ln.png"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stem", "hmpl"], "Did you mean 'hmlp'"),
        (["--stem", "hmlp:width=8"], "give --width D"),
        (["--stem", "hmlp:statistics=visible"], "every setting of it is measured"),
        (["--mask-at", "befor_stem"], "Did you mean 'before_stem'"),
        (["--mask-at", "before_stem:filler=black"], r"mask_at\.filler.*'zero' or 'mean'"),
        (["--image", "100"], "multiple of 16"),
        (["--image", "32"], "set --image to 48 or more"),
        (["--batch", "1"], "--batch is 1; set it to a number from 2"),
        (["--patch", "0"], "--patch is 0"),
        (["--width", "-4"], "--width is -4"),
    ],
)
def test_bad_input_is_named(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(["leak", *words])
