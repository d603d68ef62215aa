"""`mimkit bench step`: the plain step is BEiT's and equals ours; what is counted is known."""

import copy
import json
from pathlib import Path

import pytest
import torch

from mimkit.bench.machine import best, matmul_ceilings
from mimkit.bench.memory import peak_mib, saved_mib
from mimkit.bench.our_step import OurUpdate, count_flops
from mimkit.bench.plain_step import PlainModel, PlainUpdate, plain_adamw
from mimkit.bench.step import COMPILED, OURS, PLAIN, Precision, Report, Row, num_pieces, prove
from mimkit.bench.timing import race
from mimkit.bench.workload import make_model, make_workload
from mimkit.cli import main
from mimkit.errors import UserError
from mimkit.models.mim import MaskedImageModel

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny() -> MaskedImageModel:
    """BEiT's Ti, of two blocks."""
    model = make_model("Ti")
    model.encoder.blocks = model.encoder.blocks[:2]
    model.encoder.depth = 2
    return model


@pytest.mark.parametrize(
    ("size", "forward", "whole"),
    [("B", 36.07, 107.98), ("Ti", 2.74, 8.17)],
)
def test_the_arithmetic_is_that_of_beits_model(size: str, forward: float, whole: float) -> None:
    """Counted on the official model with 75 masked patches, attention written out."""
    found = count_flops(make_model(size, device="meta"))
    assert found == (pytest.approx(forward, abs=0.005), pytest.approx(whole, abs=0.005))


def test_the_plain_step_and_ours_agree(tiny: MaskedImageModel) -> None:
    proof = prove(tiny, copy.deepcopy(tiny), make_workload(2, device=CPU), bf16=False)
    assert proof.loss <= 1e-5 and 0 < proof.gradients <= 1e-5


def test_steps_that_do_not_agree_are_not_timed(tiny: MaskedImageModel) -> None:
    other = copy.deepcopy(tiny)
    with torch.no_grad():
        other.head.bias[0] += 1
    with pytest.raises(UserError, match="do not agree in fp32: the loss differs by"):
        prove(tiny, other, make_workload(2, device=CPU), bf16=False)


def test_updates_of_both_keep_agreeing(tiny: MaskedImageModel) -> None:
    """Clipping, the two groups of AdamW and its constants are the same, not only the gradients."""
    work = make_workload(2, device=CPU)
    plain = PlainUpdate(PlainModel(tiny, drop_path=0), work, bf16=False)
    ours = OurUpdate(copy.deepcopy(tiny), work, bf16=False, drop_path=0)
    for _ in range(2):
        plain()
        ours()
    moved = zip(tiny.parameters(), ours.model.parameters(), plain.model.parameters(), strict=True)
    for before, one, other in moved:
        assert (one - other).norm() <= 1e-3 * (one - before).norm()


def test_the_plain_optimizer_is_torchs_loop(tiny: MaskedImageModel) -> None:
    optimizer = plain_adamw(tiny)
    assert optimizer.defaults["foreach"] is False and optimizer.defaults["fused"] is False


def test_drop_path_drops_the_share_it_is_told(tiny: MaskedImageModel) -> None:
    plain = PlainModel(tiny, drop_path=0.5).train()
    kept = plain._dropped(torch.ones(4000, 1, 1), 0.25).flatten()
    assert sorted(set(kept.tolist())) == pytest.approx([0, 4 / 3])
    assert (kept > 0).float().mean() == pytest.approx(0.75, abs=0.03)


def test_what_is_saved_for_backward_is_counted_by_storage() -> None:
    """x W saves x (its weight does not count), and a square its input: 2 x 1000 x 4 bytes."""
    linear = torch.nn.Linear(1000, 1000)
    found = saved_mib(lambda n: linear(torch.ones(n, 1000)).square().sum(), linear)
    assert found * 2**20 == pytest.approx(2 * 1000 * 4)


def test_the_peak_is_what_was_taken_in_between() -> None:
    found = peak_mib(lambda: torch.ones(2**24).sum(), device=CPU)
    assert found is None or 60 <= found <= 90  # 64 MiB and what the process does


def test_ceilings_are_rates_and_bf16_has_its_own() -> None:
    found = matmul_ceilings(64, device=CPU, bf16=False)
    assert all(rate > 0 for rate in found.values()) and "fp32 torch" in found
    assert best({"fp32 torch": 100, "fp32 onednn": 220, "bf16": 400}, bf16=False) == 220
    assert best({"fp32 torch": 100, "fp32 onednn": 220, "bf16": 400}, bf16=True) == 400


def test_a_race_rotates_and_warms_up() -> None:
    order: list[str] = []
    works = {name: (lambda name=name: order.append(name)) for name in "abc"}

    def clock(work) -> float:
        work()
        return float(len(order))

    seconds = race(works, rounds=2, clock=clock)
    assert "".join(order) == "cab" + "abc" + "bca"
    assert seconds == {"a": [4.0, 9.0], "b": [5.0, 7.0], "c": [6.0, 8.0]}


def test_ratios_and_mfu_are_of_medians() -> None:
    rows = {PLAIN: Row([2.0, 4.0, 3.0], 50, None), OURS: Row([1.0, 1.0, 1.0], 40, 10)}
    precision = Precision(False, "torch", {}, rows)
    report = Report("S", 8, "cpu", 10, 30, {"fp32 torch": 480.0}, 1.0, [precision])
    assert precision.ratio(OURS) == (3.0, 2.0, 4.0)
    assert report.mfu(rows[OURS], bf16=False) == pytest.approx(8 * 30 / 480)


def test_pieces_count_every_way() -> None:
    assert num_pieces(precisions=2, rounds=3, compiled=True, official=False) == 1 + 2 * (1 + 4 * 4)
    assert COMPILED != OURS


@pytest.mark.slow
def test_the_command_writes_what_it_prints(tmp_path: Path, capsys) -> None:
    path = tmp_path / "step.json"
    words = ["--size", "Ti", "--batch", "1", "--rounds", "1", "--precision", "fp32"]
    assert main(["bench", "step", *words, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    (precision,) = found["precisions"]
    rows = precision["rows"]
    assert list(rows) == ["plain", "mimkit", "mimkit, checkpointing"]
    assert rows["mimkit, checkpointing"]["saved_mib"] < 0.15 * rows["mimkit"]["saved_mib"]
    assert rows["mimkit"]["saved_mib"] == pytest.approx(39.4, abs=0.1)
    assert rows["plain"]["saved_mib"] == pytest.approx(39.65, abs=0.1)
    assert 0 < rows["plain"]["mfu"] < 1.2
    assert "Equal to the plain step within" in capsys.readouterr().out


def test_a_folder_that_is_not_the_official_code_is_refused(tmp_path: Path) -> None:
    from mimkit.bench.official import official_model

    with pytest.raises(UserError, match=r"has no modeling_pretrain.py, modeling_finetune.py"):
        official_model(str(tmp_path), "S")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(capsys) -> None:
    assert main(["bench", "step", "--device", "cuda"]) != 0
    assert "torch finds no GPU" in capsys.readouterr().err
