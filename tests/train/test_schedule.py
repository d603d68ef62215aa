"""The learning rate is BEiT's, number by number."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import pretrain
from PIL import Image
from torch import nn

from mimkit.build import build_schedule, build_weight_decay
from mimkit.cli._schedule import far_from_recipe
from mimkit.config import TrainConfig, load_config
from mimkit.resources import configs_folder
from mimkit.schedule_plot import schedules_of
from mimkit.train.optimizer import make_optimizer, set_weight_decay
from mimkit.train.schedule import cosine, warmup_cosine

# What unilm/beit/utils.py `cosine_scheduler` gives for base 1.5e-3, final 1e-5, 12 steps, 4 of them
# warm-up: numpy.linspace(0, base, 4), then half a cosine over the other 8 without its last point.
BEIT = [0.0, 0.0005, 0.001, 0.0015, 0.0015, 0.001443290252, 0.001281794552, 0.001040099157,
        0.000755, 0.0004699008429, 0.000228205448, 6.670974828e-05]  # fmt: skip
NO_WARMUP = [1.0, 0.9140576475, 0.6890576475, 0.4109423525, 0.1859423525]


def test_the_schedule_is_beits() -> None:
    ours = [warmup_cosine(k, steps=12, warmup=4, peak=1.5e-3, floor=1e-5) for k in range(12)]
    assert ours == pytest.approx(BEIT, rel=1e-9)


def test_without_warmup_it_starts_at_the_peak() -> None:
    ours = [warmup_cosine(k, steps=5, warmup=0, peak=1.0, floor=0.1) for k in range(5)]
    assert ours == pytest.approx(NO_WARMUP, rel=1e-9)


def test_after_the_last_step_it_stays_at_the_floor() -> None:
    for step in (12, 13, 1000):
        assert warmup_cosine(step, steps=12, warmup=4, peak=1.0, floor=0.25) == 0.25


@pytest.mark.parametrize("warmup", [0, 1, 2, 11, 12])
def test_every_length_of_warmup_stays_between_nothing_and_the_peak(warmup: int) -> None:
    rates = [warmup_cosine(k, steps=12, warmup=warmup, peak=1.0, floor=0.5) for k in range(12)]
    assert all(0 <= rate <= 1 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [(-1, 2.0), (0, 2.0), (1 / 3, 1.75), (0.5, 1.5),
     (1, 1.0), (7, 1.0)],
)  # fmt: skip
def test_half_a_cosine(fraction: float, expected: float) -> None:
    assert cosine(fraction, 2.0, 1.0) == pytest.approx(expected)


def _train(**settings: Any) -> TrainConfig:
    return TrainConfig(**{"steps": 100, **settings})


def test_weight_decay_is_constant_or_half_a_cosine() -> None:
    assert build_weight_decay(_train(weight_decay=0.05), 100) is None
    rising = build_weight_decay(_train(weight_decay=0.04, weight_decay_end=0.4), 100)
    assert rising is not None
    # DINO's: final + (base - final) / 2 * (1 + cos(pi k / steps))
    expected = [0.4 + (0.04 - 0.4) / 2 * (1 + math.cos(math.pi * k / 100)) for k in range(101)]
    assert [rising(k) for k in range(101)] == pytest.approx(expected, rel=1e-12)


def test_weight_decay_reaches_what_decays_and_nothing_else() -> None:
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(model, decays=lambda name, _: name == "weight", weight_decay=0.05,
                               betas=(0.9, 0.999), eps=1e-8)  # fmt: skip
    set_weight_decay(optimizer, 0.0)
    set_weight_decay(optimizer, 0.3)  # a group that was at 0 for a while is not forgotten
    decays = {len(group["params"][0].shape): group["weight_decay"]
              for group in optimizer.param_groups}  # fmt: skip
    assert decays == {2: 0.3, 1: 0.0}


def test_a_plot_has_a_panel_for_everything_that_is_scheduled(tmp_path: Path) -> None:
    train = _train(weight_decay_end=0.2, ema=0.99)
    panels = schedules_of(train, steps=100, scales={"head": 1.0, "block 1": 0.5})
    assert {name: [curve.name for curve in curves] for name, curves in panels.items()} == {
        "learning rate": ["head", "block 1"], "weight decay": [""],
        "momentum": ["beta 1", "beta 2"], "average of the weights": ["decay"],
    }  # fmt: skip
    head, block = (curve.value for curve in panels["learning rate"])
    assert head(50) == build_schedule(train, 100)(50) == 2 * block(50)
    (decay,) = panels["weight decay"]
    assert decay.value(100) == 0.2


def test_the_command_draws_and_does_not_train(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*tiny, "train.steps=null", "train.epochs=2", "--plot-schedule", "plot.png"]
    assert pretrain(words) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]
    assert np.asarray(Image.open("plot.png").convert("L")).std() > 10  # something is drawn


@pytest.mark.parametrize(
    ("overrides", "far"),
    [
        ([], False),
        (["train.batch_size=256"], False),  # four times 64
        (["train.batch_size=512"], True),
        (["train.batch_size=8"], True),
        (["train.batch_size=512", "train.lr=1e-2"], False),
    ],
)
def test_a_batch_far_from_the_recipes_is_pointed_at_unless_the_rate_is_set(
    overrides: list[str], far: bool
) -> None:
    path = configs_folder() / "default.yaml"
    said = far_from_recipe(path, load_config(path, overrides).train, overrides)
    assert (said is not None) == far
    if overrides == ["train.batch_size=512"]:
        assert said is not None
        assert "8 times the 64 of default.yaml" in said
        assert "train.lr=0.002" in said
        assert "0.016" in said
