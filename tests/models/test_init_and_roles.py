"""Where every parameter starts, what it is for, and whether it decays."""

import math

import pytest
import torch
from torch import nn

from mimkit.models.init import STD, initialise
from mimkit.models.roles import Role, decays, role_of
from mimkit.models.stems import STEMS

POSITIONS = ["absolute", "relative_shared", "relative", "none"]


@pytest.mark.parametrize("stem", STEMS.names())
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("branches", [1, 2])
def test_every_parameter_starts_as_in_beit(make_model, stem, positions, branches) -> None:
    model = make_model(stem, positions=positions, branches=branches)
    for name, parameter in model.named_parameters():
        role = role_of(model)[name]
        if parameter.ndim == 1:
            constant = 0.1 if role.kind == "scale" else float("bias" not in name)
            assert (parameter == constant).all(), name
            continue
        limit = STD
        residual = name.endswith(("attn.proj.weight", "mlp.fc2.weight"))
        if residual and role.kind != "stem":  # the residual stream is the encoder's
            limit = STD / math.sqrt(2 * role.depth)
        if name.endswith(".table"):
            assert (parameter == 0).all(), name
            continue
        assert parameter.abs().max() <= limit * (1 + 1e-6), name
        if parameter.numel() > 500:  # uniform-like between the cuts: std 0.54 of the normal's
            assert parameter.std().item() == pytest.approx(0.54 * limit, rel=0.1), name


def test_initialising_again_gives_the_same_model(make_model) -> None:
    model = make_model("hmlp", stem_settings={"norm": "bn"})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()(torch.rand(2, 3, 32, 48), torch.ones(2, 6, dtype=torch.bool))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    initialise(model, seed=0)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    initialise(model, seed=1)
    assert not torch.equal(before["head.weight"], model.head.weight)


@pytest.mark.parametrize("other", STEMS.names())
def test_arms_of_a_study_start_equal_where_they_can(make_model, other: str) -> None:
    torch.manual_seed(0)
    one = make_model("linear").state_dict()
    torch.manual_seed(1)
    two = make_model(other, depth=4).state_dict()
    shared = [name for name in one if name in two and one[name].shape == two[name].shape]
    assert sum(not name.startswith("stem.") for name in shared) == len(one) - 2
    assert all(torch.equal(one[name], two[name]) for name in shared)


def test_a_parameter_without_a_rule_or_role_is_an_error(make_model) -> None:
    model = make_model()
    model.encoder.strange = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(ValueError, match=r"encoder\.strange"):
        initialise(model, seed=0)
    with pytest.raises(ValueError, match=r"encoder\.strange"):
        role_of(model)


@pytest.mark.parametrize("stem", STEMS.names())
@pytest.mark.parametrize("positions", POSITIONS)
def test_everything_has_a_role(make_model, stem: str, positions: str) -> None:
    model = make_model(stem, positions=positions, branches=2)
    roles = role_of(model)
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    assert sorted(roles) == sorted(names)
    assert all(role.depth in range(5) for role in roles.values())
    assert {role.depth for name, role in roles.items() if name.startswith("stem.")} == {0}
    inner = role_of(model.image_encoder)
    assert inner == {name: roles[name] for name in inner}


def test_roles_by_example(make_model) -> None:
    roles = role_of(make_model(branches=2))
    assert roles["stem.project.bias"] == Role("stem", 0, 0)
    assert roles["mask_token"] == roles["encoder.cls_token"] == Role("token", 0, 0)
    assert roles["encoder.pos_embed"] == Role("position", 0, 0)
    assert roles["encoder.blocks.1.attns.1.attn.q_bias"] == Role("attention", 1, 2)
    assert roles["encoder.blocks.0.ffns.1.mlp.fc1.weight"] == Role("ffn", 1, 1)
    assert roles["encoder.blocks.2.ffns.0.norm.weight"] == Role("norm", 0, 3)
    assert roles["encoder.blocks.2.attns.1.ls.gamma"] == Role("scale", 1, 3)
    assert roles["encoder.norm.bias"] == Role("norm", 0, 4)
    assert roles["head.weight"] == Role("head", 0, 4)
    shared = role_of(make_model(positions="relative_shared"))
    assert shared["encoder.relative.0.table"] == Role("position", 0, 0)
    own = role_of(make_model(positions="relative"))
    assert own["encoder.relative.1.table"] == Role("position", 0, 2)


def test_weight_decay_as_in_beit(make_model) -> None:
    for positions in ("absolute", "relative_shared"):
        model = make_model("hmlp", positions=positions)
        spared = {n for n, p in model.named_parameters() if not decays(n, p)}
        vectors = {n for n, p in model.named_parameters() if p.ndim == 1}
        embeddings = {"encoder.cls_token"}
        embeddings |= {"encoder.pos_embed"} if positions == "absolute" else set()
        assert spared == vectors | embeddings
