"""DeepSpeed at every ZeRO stage, with one and two ranks, against plain PyTorch on one process.

On a machine with GPUs this runs on them: tools/check_gpu.sh.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from mimkit.models.blocks import draw_keep, drop_path_rates
from mimkit.models.encoder import Encoder
from mimkit.models.init import initialise
from mimkit.models.mim import MaskedImageModel
from mimkit.models.roles import decays, role_of
from mimkit.models.stems import STEMS
from mimkit.ports import free_port
from mimkit.random import Purpose, torch_generator
from mimkit.train.optimizer import make_optimizer
from mimkit.train.runtimes import RUNTIMES, Runtime, UpdateRule, plain_weights

GLOBAL, STEPS, VOCABULARY = 8, 6, 64
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "hmlp": ("hmlp", {"norm": "bn"}),
    "hmlp visible": ("hmlp", {"statistics": "visible"}),
    "levit visible": ("levit", {"statistics": "visible"}),
    "levit frozen": ("levit", {"statistics": "frozen"}),
    # layer-wise learning rates and decays, blocks recomputed in backward
    "groups": ("linear", {}),
    # the same, attention alone trained: what finetuning by role does
    "attention": ("linear", {}),
}
GROUPED = ("groups", "attention")
NORMED = tuple(stem for stem, (name, _) in ARMS.items() if name != "linear")
RATE, LAYER_DECAY = 1e-2, 0.5


def _model(stem: str) -> MaskedImageModel:
    name, settings = ARMS[stem]
    part = STEMS[name](width=32, patch_size=4, **settings)
    encoder = Encoder(width=32, heads=2, depth=2, grid=(4, 4), positions="relative_shared",
                      activation_checkpointing=stem in GROUPED)  # fmt: skip
    model = MaskedImageModel(stem=part, encoder=encoder, prediction_dim=VOCABULARY)
    initialise(model, seed=0)
    if stem == "attention":
        roles = role_of(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = roles[name].kind == "attention"
    return model


def _optimizer(model: MaskedImageModel, stem: str) -> torch.optim.AdamW:
    """Two groups, or one for every depth and kind of decay, whose rate shrinks towards the stem."""
    if stem not in GROUPED:
        return make_optimizer(model, decays=decays, weight_decay=0.05, betas=(0.9, 0.999),
                              eps=1e-8)  # fmt: skip
    roles, groups = role_of(model), dict[tuple[int, bool], list[torch.nn.Parameter]]()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            key = roles[name].depth, decays(name, parameter)
            groups.setdefault(key, []).append(parameter)
    return torch.optim.AdamW([
        {"params": found, "weight_decay": 0.05 if decay else 0.0,
         "scale": LAYER_DECAY ** (3 - depth)}
        for (depth, decay), found in groups.items()
    ], lr=0.0, fused=True)  # fmt: skip


def _batch(update: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same global batch for everybody: images, masks, tokens, drop path."""
    draw = torch.Generator().manual_seed(update)
    image_BCHW = torch.randn(GLOBAL, 3, 16, 16, generator=draw)
    mask_BN = torch.rand(GLOBAL, 16, generator=draw).argsort(dim=1) < 6
    target_BN = torch.randint(VOCABULARY, (GLOBAL, 16), generator=draw)
    noise = torch_generator(Purpose.DROP_PATH, seed=0, sample=update)
    keep_LB2R = draw_keep(drop_path_rates(2, 0.3), batch=GLOBAL, generator=noise)
    return image_BCHW, mask_BN, target_BN, keep_LB2R


def _updates(runtime: Runtime, rule: UpdateRule, first: int, last: int, optimizer: Any
             ) -> list[float]:  # fmt: skip
    """Losses of the global batches of updates first..last."""
    losses = []
    for update in range(first, last):
        image_BCHW, mask_BN, target_BN, keep_LB2R = (t.to(runtime.device) for t in _batch(update))
        for group in optimizer.param_groups:
            group["lr"] = RATE * group.get("scale", 1.0)
        total = torch.zeros((), device=runtime.device)
        for micro in range(rule.accumulation):
            start = (micro * runtime.world + runtime.rank) * rule.micro_batch
            rows = slice(start, start + rule.micro_batch)
            predicted_MV = runtime.model(image_BCHW[rows], mask_BN[rows], keep_LB2R[:, rows])
            target_M = target_BN[rows][mask_BN[rows]]
            loss = torch.nn.functional.cross_entropy(predicted_MV.float(), target_M)
            runtime.backward(loss)
            total += loss.detach() / rule.accumulation / runtime.world
        losses.append(float(runtime.sum(total)))
    return losses


def _start(runtime: Runtime, stem: str, rule: UpdateRule) -> torch.optim.AdamW:
    model = _model(stem)
    optimizer = _optimizer(model, stem)
    runtime.prepare(model, optimizer, rule)
    runtime.model.train()
    return optimizer


def _rule(stage: int, world: int, *, accumulation: int = 1, bf16: bool = False) -> UpdateRule:
    return UpdateRule(
        micro_batch=GLOBAL // world // accumulation,
        accumulation=accumulation,
        clip_grad=0.5,
        bf16=bf16,
        zero_stage=stage,
        deepspeed_config=None,
    )


def _resumed(runtime: Runtime, stem: str, rule: UpdateRule) -> list[float]:
    """Half the updates, then everything gathered and put into a new engine for the other half."""
    optimizer = _start(runtime, stem, rule)
    losses = _updates(runtime, rule, 0, STEPS // 2, optimizer)
    weights, moments = runtime.weights(), runtime.moments()
    model = _model(stem)
    model.load_state_dict(weights)
    optimizer = _optimizer(model, stem)
    runtime.prepare(model, optimizer, rule)
    runtime.restore(moments, updates=STEPS // 2)
    runtime.model.train()
    return losses + _updates(runtime, rule, STEPS // 2, STEPS, optimizer)


def _stages(stem: str, world: int) -> Sequence[int]:
    """One process on a CPU divides nothing: it gets half of what two ranks, or a GPU, get."""
    every = (0, 1, 2, 3) if stem in ("hmlp", *GROUPED) else (0, 3)
    if world > 1 or torch.cuda.is_available() or stem == "hmlp":
        return every
    return every[1::2]


def _rank(rank: int, world: int, port: int, folder: str, stems: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"LOCAL_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    runtime = RUNTIMES["deepspeed"]()
    found, buffers, settings = {}, {}, {}
    for stem in stems:
        for stage in _stages(stem, world):
            rule = _rule(stage, world)
            optimizer = _start(runtime, stem, rule)
            settings[f"{stem} {stage}"] = runtime.effective_settings()
            losses = _updates(runtime, rule, 0, STEPS, optimizer)
            named = runtime.model.named_buffers()
            buffers[stem, stage] = {n: b.clone() for n, b in named if ".stem." in n}
            found[stem, stage, "plain"] = losses, runtime.weights(), float(runtime.grad_norm)
            if stem == "hmlp":  # has buffers besides parameters
                found[stem, stage, "resumed"] = (_resumed(runtime, stem, rule),
                                                 runtime.weights(), 0.0)  # fmt: skip
    for stage in _stages("groups", world):
        for how, rule in (("accumulated", _rule(stage, world, accumulation=2)),
                          ("bf16", _rule(stage, world, bf16=True))):  # fmt: skip
            optimizer = _start(runtime, "groups", rule)
            losses = _updates(runtime, rule, 0, STEPS, optimizer)
            found["groups", stage, how] = losses, runtime.weights(), 0.0
    torch.save(buffers, Path(folder) / f"buffers-{rank}.pt")
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
        (Path(folder) / "settings.json").write_text(json.dumps(settings))
    runtime.close()


@pytest.fixture(scope="module")
def plain() -> dict[str, tuple[list[float], dict[str, Tensor], float]]:
    """What plain PyTorch gets."""
    torch.set_num_threads(1)
    found = {}
    for stem in ARMS:
        runtime = RUNTIMES["local"]()
        rule = _rule(0, 1)
        optimizer = _start(runtime, stem, rule)
        losses = _updates(runtime, rule, 0, STEPS, optimizer)
        found[stem] = losses, runtime.weights(), float(runtime.grad_norm)
    return found


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_stage_and_world_size_equals_plain_pytorch(
    world: int, plain: dict[str, Any], tmp_path: Path
) -> None:
    if torch.cuda.is_available() and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    exact = 1e-4 if torch.cuda.is_available() else 1e-5
    arguments = (world, free_port(), str(tmp_path), list(ARMS))
    mp.spawn(_rank, args=arguments, nprocs=world)
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    for (stem, stage, how), (losses, weights, norm) in found.items():
        tolerance = 2e-2 if how == "bf16" else exact
        where = f"{stem}, stage {stage}, {world} ranks, {how}"
        assert losses == pytest.approx(plain[stem][0], abs=tolerance), where
        if how == "plain":
            assert norm == pytest.approx(plain[stem][2], rel=1e-3), where
        if how == "bf16":
            continue
        assert weights.keys() == plain[stem][1].keys(), where
        for name, value in weights.items():
            expected = plain[stem][1][name]
            if stem in NORMED and name.startswith("stem.layers") and name.endswith("bias"):
                continue  # BatchNorm takes a bias out again: its gradient is noise, Adam's step not
            assert (value.float() - expected.float()).abs().max() < 2e-3, f"{where}: {name}"
        if how == "resumed":  # against the same engine uninterrupted: to the last bit
            straight, whole, _ = found[stem, stage, "plain"]
            assert losses == straight, where
            assert all(torch.equal(value, whole[name]) for name, value in weights.items()), where

    attention = plain["attention"][1]
    start = plain_weights(_model("attention"))
    moved = {name for name, value in attention.items() if not torch.equal(value, start[name])}
    assert moved == {name for name, role in role_of(_model("attention")).items()
                     if role.kind == "attention"}  # fmt: skip
    for stage in _stages("attention", world):  # what is frozen stays to the last bit
        weights = found["attention", stage, "plain"][1]
        assert {n for n, value in weights.items() if not torch.equal(value, start[n])} == moved

    for name, effective in json.loads((tmp_path / "settings.json").read_text()).items():
        _check_settings(effective, world, stage=int(name[-1]), grouped=name.split()[0] in GROUPED)

    of_ranks = [torch.load(tmp_path / f"buffers-{rank}.pt", weights_only=True)
                for rank in range(world)]  # fmt: skip
    for (stem, stage), named in of_ranks[0].items():
        assert bool(named) == (stem in NORMED), "batch norms have running statistics"
        for name, value in named.items():
            where = f"{name} of {stem} at stage {stage}"
            assert value.dtype in (torch.float32, torch.int64), where
            assert all(torch.equal(value, other[stem, stage][name]) for other in of_ranks), where
            if name.endswith("running_mean"):
                assert bool((value != 0).any()) == ("frozen" not in stem), where


def _check_settings(effective: dict[str, Any], world: int, *, stage: int, grouped: bool) -> None:
    """What DeepSpeed says that it runs with is the rule."""
    used, rule = effective["used"], _rule(stage, world)
    assert (used["train_batch_size"], used["gradient_accumulation_steps"]) == (GLOBAL, 1)
    assert used["gradient_clipping"] == rule.clip_grad
    assert used["zero_optimization"]["stage"] == stage
    assert used["torch_autocast"]["enabled"] is False
    assert used["scheduler"] is None
    assert used["optimizer"] == "AdamW"
    groups = used["groups"]
    assert {group["weight_decay"] for group in groups} == {0.0, 0.05}
    assert {(*group["betas"], group["eps"]) for group in groups} == {(0.9, 0.999, 1e-8)}
    scales = {group.get("scale") for group in groups}
    assert scales == ({None} if not grouped else scales - {None})


def test_resume_of_the_plain_runtime_is_exact(plain: dict[str, Any]) -> None:
    for stem, (losses, weights, _) in plain.items():
        runtime = RUNTIMES["local"]()
        assert _resumed(runtime, stem, _rule(0, 1)) == losses
        assert all(torch.equal(value, weights[name]) for name, value in runtime.weights().items())
