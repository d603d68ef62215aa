"""Blocks and encoder against timm's, and drop path as an argument."""

import pytest
import torch
from timm.models.beit import Beit
from timm.models.vision_transformer import ParallelThingsBlock, VisionTransformer
from torch.nn import functional

from mimkit.errors import UserError
from mimkit.models.attention import attend
from mimkit.models.blocks import Block, draw_keep, drop_path_rates
from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.init import initialise
from mimkit.models.stems import STEMS

SIZE = {"width": 32, "heads": 4, "depth": 3, "grid": (2, 3)}
TIMM = {"img_size": (32, 48), "patch_size": 16, "embed_dim": 32, "depth": 3, "num_heads": 4}


def shake(module: torch.nn.Module) -> None:
    """Every parameter away from where it starts, so that none is tested at zero or one."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)


def our_model(**settings) -> ImageEncoder:
    model = ImageEncoder(STEMS["linear"](width=32), Encoder(**{**SIZE, **settings}))
    initialise(model, seed=0)
    shake(model)
    return model.eval()


def timm_name(name: str, *, shared: bool = False) -> str:
    table = "relative_position_bias_table"
    if ".relative." in name:
        block = name.split(".")[2]
        return f"rel_pos_bias.{table}" if shared else f"blocks.{block}.attn.{table}"
    for old, new in [
        ("stem.project", "patch_embed.proj"),
        ("attns.0.norm", "norm1"),
        ("ffns.0.norm", "norm2"),
        ("attns.0.attn", "attn"),
        ("ffns.0.mlp", "mlp"),
        ("attns.0.ls.gamma", "gamma_1"),
        ("ffns.0.ls.gamma", "gamma_2"),
        ("encoder.", ""),
    ]:
        name = name.replace(old, new)
    return name


@pytest.mark.parametrize("positions", ["absolute", "relative_shared", "relative", "none"])
@pytest.mark.parametrize("layer_scale", [0.1, None])
def test_the_encoder_is_timms_beit_with_the_same_weights(positions: str, layer_scale) -> None:
    model = our_model(positions=positions, layer_scale=layer_scale)
    beit = Beit(
        **TIMM,
        num_classes=0,
        global_pool="token",
        init_values=layer_scale,
        use_abs_pos_emb=positions == "absolute",
        use_rel_pos_bias=positions == "relative",
        use_shared_rel_pos_bias=positions == "relative_shared",
    ).eval()
    shared = positions == "relative_shared"
    state = model.state_dict()
    weights = {timm_name(name, shared=shared): weight for name, weight in state.items()}
    beit.load_state_dict(weights)
    image_BCHW = torch.rand(2, 3, 32, 48)
    torch.testing.assert_close(
        model(image_BCHW), beit.forward_features(image_BCHW), rtol=0, atol=1e-5
    )


def test_full_qkv_bias_is_timms_vision_transformer() -> None:
    model = our_model(qkv_bias="qkv", layer_scale=None)
    vit = VisionTransformer(**TIMM, num_classes=0).eval()
    vit.load_state_dict({timm_name(name): w for name, w in model.state_dict().items()})
    image_BCHW = torch.rand(2, 3, 32, 48)
    torch.testing.assert_close(
        model(image_BCHW), vit.forward_features(image_BCHW), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("branches", [2, 3])
def test_branches_are_timms_parallel_block(branches: int) -> None:
    ours = Block(32, heads=4, qkv_bias="qkv", layer_scale=0.1, branches=branches)
    theirs = ParallelThingsBlock(32, 4, num_parallel=branches, qkv_bias=True, init_values=0.1)
    shake(ours)
    theirs.load_state_dict(ours.state_dict())
    tokens_BND = torch.randn(2, 7, 32)
    torch.testing.assert_close(ours(tokens_BND), theirs(tokens_BND), rtol=0, atol=1e-5)


@pytest.mark.parametrize("branches", [1, 2])
def test_keep_multiplies_what_attention_and_mlp_add(branches: int) -> None:
    block = Block(32, heads=4, branches=branches)
    shake(block)
    tokens_BND = torch.randn(4, 7, 32)
    keep_B2 = torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
    out_BND = block(tokens_BND, keep_B2R=keep_B2[..., None].expand(-1, -1, branches))
    attended_BND = sum(branch(tokens_BND, bias_KNN=None) for branch in block.attns)
    mixed_BND = sum(branch(tokens_BND) for branch in block.ffns)
    torch.testing.assert_close(out_BND[0], block(tokens_BND)[0])
    assert torch.equal(out_BND[1], tokens_BND[1])
    torch.testing.assert_close(out_BND[2], (tokens_BND + mixed_BND)[2])
    torch.testing.assert_close(out_BND[3], (tokens_BND + 2 * attended_BND)[3])


def test_each_branch_is_kept_or_dropped_by_itself() -> None:
    block = Block(32, heads=4, branches=3)
    shake(block)
    tokens_BND = torch.randn(2, 7, 32)
    keep_B2R = torch.tensor(
        [[[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]], [[1.0, 0.0, 0.0], [0.0, 1.0, 2.0]]]
    )
    out_BND = block(tokens_BND, keep_B2R=keep_B2R)
    for number, (keep_attn_R, keep_mlp_R) in enumerate(keep_B2R):
        x_1ND = tokens_BND[number : number + 1]
        attended = [keep * branch(x_1ND, bias_KNN=None)
                    for keep, branch in zip(keep_attn_R, block.attns, strict=True)]  # fmt: skip
        x_1ND = x_1ND + sum(attended)
        mixed = [keep * branch(x_1ND) for keep, branch in zip(keep_mlp_R, block.ffns, strict=True)]
        torch.testing.assert_close(out_BND[number], (x_1ND + sum(mixed))[0], rtol=0, atol=1e-5)


def test_multipliers_of_another_number_of_branches_are_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Block(32, heads=4, branches=2)(torch.randn(2, 7, 32), keep_B2R=torch.ones(2, 2, 1))


def test_drop_path_rates_are_linear() -> None:
    assert drop_path_rates(5, 0.2) == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert drop_path_rates(1, 0.2) == [0.0]
    with pytest.raises(UserError, match=r"encoder\.drop_path is 1"):
        drop_path_rates(5, 1.0)


def test_keep_is_unbiased_and_a_function_of_its_generator() -> None:
    first, again = (
        draw_keep([0.0, 0.5], batch=20_000, generator=torch.Generator().manual_seed(1))
        for _ in range(2)
    )
    assert torch.equal(first, again)
    assert first.shape == (2, 20_000, 2, 1)
    assert first.dtype == torch.float32
    assert (first[0] == 1).all()
    assert sorted(first[1].unique().tolist()) == [0.0, 2.0]
    assert first.mean().item() == pytest.approx(1, abs=0.02)


def test_one_branch_draws_a_number_for_each_block_sample_and_residual() -> None:
    """Runs of one branch keep their numbers: blocks, samples, residuals, in this order."""
    keep_LB2R = draw_keep([0.2, 0.5], batch=9, generator=torch.Generator().manual_seed(1))
    draw_LB2 = torch.rand((2, 9, 2), generator=torch.Generator().manual_seed(1))
    expected_LB2 = torch.stack([(draw_LB2[0] < 0.8) / 0.8, (draw_LB2[1] < 0.5) / 0.5])
    torch.testing.assert_close(keep_LB2R[..., 0], expected_LB2)


def test_branches_are_drawn_independently() -> None:
    noise = torch.Generator().manual_seed(1)
    keep_LB2R = draw_keep([0.5], batch=20_000, branches=3, generator=noise)
    assert keep_LB2R.shape == (1, 20_000, 2, 3)
    kept_R = (keep_LB2R > 0).flatten(0, 2).float()
    assert torch.corrcoef(kept_R.T).fill_diagonal_(0).abs().max() < 0.02
    assert kept_R.mean(0).tolist() == pytest.approx([0.5] * 3, abs=0.01)


@pytest.mark.parametrize("biased", [True, False])
def test_the_formula_is_torchs_fused_attention(biased: bool) -> None:
    q_BKNd, k_BKNd, v_BKNd = torch.randn(3, 2, 4, 7, 8)
    bias_KNN = torch.randn(4, 7, 7) if biased else None
    fused = functional.scaled_dot_product_attention(q_BKNd, k_BKNd, v_BKNd, attn_mask=bias_KNN)
    formula = attend(q_BKNd, k_BKNd, v_BKNd, bias_KNN=bias_KNN)
    torch.testing.assert_close(formula, fused, rtol=0, atol=1e-5)


@pytest.mark.parametrize("positions", ["absolute", "relative_shared", "relative"])
@pytest.mark.parametrize("branches", [1, 2])
def test_checkpointing_changes_no_gradient(positions: str, branches: int) -> None:
    grads = []
    image_BCHW = torch.rand(2, 3, 32, 48)
    noise = torch.Generator().manual_seed(0)
    keep_LB2R = draw_keep([0, 0.3, 0.6], batch=2, branches=branches, generator=noise)
    settings = {"positions": positions, "branches": branches}
    for checkpointing in (False, True):
        model = our_model(**settings, activation_checkpointing=checkpointing).train()
        model(image_BCHW, keep_LB2R).square().sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_intermediates_are_counted_from_one_and_lack_the_final_norm() -> None:
    model = our_model()
    image_BCHW = torch.rand(2, 3, 32, 48)
    second, last = model.intermediates(image_BCHW, [2, 3])
    torch.testing.assert_close(model.encoder.norm(last), model(image_BCHW))
    torch.testing.assert_close(model.encoder.blocks[2](second), last)
    with pytest.raises(UserError, match=r"1\.\.3"):
        model.intermediates(image_BCHW, [0])


def test_images_of_another_grid_are_refused() -> None:
    with pytest.raises(UserError, match=r"2x3 patches but got 9 tokens.*data\.image_size"):
        our_model()(torch.rand(1, 3, 48, 48))


def test_bf16_autocast_keeps_the_residual_stream_in_float32() -> None:
    for positions in ("absolute", "relative_shared"):
        model = our_model(positions=positions)
        image_BCHW = torch.rand(2, 3, 32, 48)
        keep_LB2R = torch.ones(3, 2, 2, 1)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = model.intermediates(image_BCHW, [3])[0]
            assert model(image_BCHW, keep_LB2R).isfinite().all()
        assert mixed.dtype == torch.float32
        exact = model.intermediates(image_BCHW, [3])[0]
        assert (mixed - exact).norm() / exact.norm() < 0.02
