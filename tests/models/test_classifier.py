"""The classifier: pooling, its head, what trains, and the paper's shares of a ViT."""

import pytest
import torch

from mimkit.errors import UserError
from mimkit.models.classifier import ImageClassifier, with_bias_per_block
from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.init import initialise
from mimkit.models.moved import moved_by_role, unequal
from mimkit.models.roles import decays, learning_rate_scales, role_of, trained_names
from mimkit.models.stems import STEMS


def _encoder(
    *, stem: str = "linear", stem_settings=None, seed: int = 0, **settings
) -> ImageEncoder:
    made = {"width": 32, "heads": 4, "depth": 3, "grid": (2, 3), **settings}
    model = ImageEncoder(
        STEMS[stem](width=made["width"], patch_size=16, **(stem_settings or {})), Encoder(**made)
    )
    initialise(model, seed=seed)
    return model


def _classifier(*, pooling: str = "mean", classes: int = 7, **settings) -> ImageClassifier:
    model = ImageClassifier(_encoder(**settings), num_classes=classes, pooling=pooling)
    model.initialise_head(seed=0, scale=1.0)
    return model


def _numbers(model: ImageClassifier, roles: list[str], *, head: bool) -> int:
    names = trained_names(model, roles, head=head)
    return sum(p.numel() for n, p in model.named_parameters() if n in names)


@pytest.fixture(scope="module")
def vit_b() -> ImageClassifier:
    """ViT-B/16 at 224 pixels with 1000 classes and the class token, 86,567,656 parameters."""
    with torch.device("meta"):
        stem = STEMS["linear"](width=768, patch_size=16)
        encoder = Encoder(width=768, heads=12, depth=12, grid=(14, 14), qkv_bias="qkv",
                          layer_scale=None)  # fmt: skip
        return ImageClassifier(ImageEncoder(stem, encoder), num_classes=1000, pooling="cls")


def test_shares_of_vit_b_are_the_papers(vit_b: ImageClassifier) -> None:
    """Its figure 4 has 28.4 of 86.6 M; the authors' code leaves head and positions on as well."""
    assert sum(p.numel() for p in vit_b.parameters()) == 86_567_656
    assert _numbers(vit_b, ["attention"], head=False) == 28_348_416
    assert _numbers(vit_b, ["attention", "position"], head=True) == 29_268_712
    ffn = _numbers(vit_b, ["ffn"], head=False)
    assert ffn / 86_567_656 == pytest.approx(0.655, abs=5e-4)


def test_the_attention_of_every_branch_trains() -> None:
    """33.1 % of 18x2 with LayerScale; by the name `.attn.`, as in DeiT's code, it would be 16.6."""
    with torch.device("meta"):
        stem = STEMS["linear"](width=768, patch_size=16)
        encoder = Encoder(width=768, heads=12, depth=18, grid=(14, 14), qkv_bias="qkv",
                          layer_scale=1e-4, branches=2)  # fmt: skip
        model = ImageClassifier(ImageEncoder(stem, encoder), num_classes=1000, pooling="cls")
    total = sum(p.numel() for p in model.parameters())
    assert total == pytest.approx(256.7e6, rel=1e-3)
    assert _numbers(model, ["attention"], head=False) == 36 * (4 * 768 * 768 + 4 * 768)
    assert _numbers(model, ["attention"], head=False) / total == pytest.approx(0.331, abs=5e-4)


@pytest.mark.parametrize("stem", STEMS.names())
@pytest.mark.parametrize("branches", [1, 2])
def test_roles_divide_the_parameters(stem: str, branches: int) -> None:
    model = _classifier(stem=stem, branches=branches, layer_scale=0.1)
    each = [trained_names(model, [role], head=False) for role in
            ("attention", "ffn", "norm", "scale", "stem", "position", "token", "head")]  # fmt: skip
    names = {name for name, _ in model.named_parameters()}
    assert set().union(*each) == names == trained_names(model, ["all"], head=False)
    assert sum(map(len, each)) == len(names)
    biases = trained_names(model, ["bias"], head=False)
    assert biases == {n for n in names if n.endswith("bias") and "head." not in n
                      and "pool_norm" not in n}  # fmt: skip


def test_a_role_that_matches_nothing_is_named_with_those_there_are() -> None:
    model = _classifier(layer_scale=None)
    with pytest.raises(UserError, match="no parameter of the role scale; it has attention, ffn"):
        trained_names(model, ["attention", "scale"])


@pytest.mark.parametrize("branches", [1, 2])
def test_learning_rates_are_beits_for_its_model(branches: int) -> None:
    """unilm: decay ** (num_layers + 1 - layer_id), layer 0 what embeds, 1..12 the blocks."""
    model = _classifier(depth=12, positions="relative", branches=branches)
    scales = learning_rate_scales(model, decay=0.65)
    for name, scale in scales.items():
        if name.startswith(("encoder.blocks.", "encoder.relative.")):  # tables are the blocks' own
            layer = int(name.split(".")[2]) + 1
        elif name.startswith(("stem.", "encoder.cls_token")):
            layer = 0
        else:
            assert name.startswith(("pool_norm.", "head."))
            layer = 13
        assert scale == pytest.approx(0.65 ** (13 - layer), rel=1e-12), name
    assert scales["head.weight"] == 1
    assert scales["stem.project.weight"] == pytest.approx(0.0036972, rel=1e-4)


def test_a_shared_bias_learns_as_slowly_as_what_embeds() -> None:
    """BEiT's code puts `rel_pos_bias` and every name it does not know with the head."""
    model = _classifier(positions="relative_shared", stem="hmlp")
    scales = learning_rate_scales(model, decay=0.5)
    slow = {name for name, scale in scales.items() if scale == 0.5**4}
    assert "encoder.relative.0.table" in slow
    assert {n for n in scales if n.startswith("stem.")} < slow
    fast = {name for name, scale in scales.items() if scale == 1}
    assert fast == {"pool_norm.weight", "pool_norm.bias", "head.weight", "head.bias"}


def test_vectors_and_embeddings_do_not_decay() -> None:
    model = _classifier()
    decaying = {name for name, p in model.named_parameters() if decays(name, p)}
    assert all(p.ndim > 1 for n, p in model.named_parameters() if n in decaying)
    assert not {"encoder.cls_token", "encoder.pos_embed", "pool_norm.weight"} & decaying


def test_mean_pooling_has_a_fresh_norm_in_place_of_the_last_one() -> None:
    encoder = _encoder()
    images = torch.rand(2, 3, 32, 48)
    with torch.no_grad():
        encoder.encoder.norm.weight.fill_(3.0)  # of pretraining; BEiT does not carry it over
        block_BND = encoder.intermediates(images, [3])[0]
        model = ImageClassifier(encoder, num_classes=7, pooling="mean")
        expected = model.head(torch.nn.functional.layer_norm(block_BND[:, 1:].mean(1), (32,),
                                                             eps=1e-6))  # fmt: skip
        torch.testing.assert_close(model(images), expected)


def test_class_token_pooling_keeps_the_last_norm() -> None:
    encoder = _encoder()
    images = torch.rand(2, 3, 32, 48)
    with torch.no_grad():
        encoder.encoder.norm.weight.fill_(3.0)
        expected_BD = encoder(images)[:, 0]
        model = ImageClassifier(encoder, num_classes=7, pooling="cls")
        torch.testing.assert_close(model(images), model.head(expected_BD))
    assert [n for n, _ in model.named_parameters() if n.startswith("pool_norm")] == []


def test_the_head_starts_small_as_in_beit() -> None:
    one, other = _classifier(classes=500), _classifier(classes=500)
    other.initialise_head(seed=0, scale=0.001)
    torch.testing.assert_close(other.head.weight * 1000, one.head.weight)
    assert one.head.weight.std().item() == pytest.approx(0.54 * 0.02, rel=0.05)
    assert not one.head.bias.any()


def test_a_bias_for_each_block_gives_the_same_tokens() -> None:
    encoder = _encoder(positions="relative_shared").eval()
    with torch.no_grad():
        encoder.encoder.relative[0].table.normal_(generator=torch.Generator().manual_seed(0))
        images = torch.rand(2, 3, 32, 48)
        before = encoder(images)
        after = with_bias_per_block(encoder)
        assert torch.equal(after(images), before)
    assert after.encoder.positions == "relative" and len(after.encoder.relative) == 3
    assert role_of(after)["encoder.relative.2.table"].depth == 3
    tables = {id(bias.table) for bias in after.encoder.relative}
    assert len(tables) == 3


@pytest.mark.parametrize("still", [True, False])
def test_a_frozen_stem_keeps_its_statistics(still: bool) -> None:
    model = _classifier(stem="hmlp", stem_settings={"norm": "bn"})
    model.still_stem = still
    before = {name: value.clone() for name, value in model.named_buffers()}
    model.eval()
    model.train()(torch.rand(4, 3, 32, 48))
    after = dict(model.named_buffers())
    moved = unequal(before, after, [name for name in before if "running" in name])
    assert bool(moved) != still
    assert model.training


def test_what_moved_is_counted_by_role() -> None:
    model = _classifier()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.encoder.blocks[1].attns[0].attn.proj.weight[0, 0] += 1e-3
        model.head.bias += 1
    table = moved_by_role(before, model.state_dict(), role_of(model))
    assert table["attention"].moved == 32 * 32
    assert table["attention"].numbers == 3 * (4 * 32 * 32 + 3 * 32)  # queries, values, projection
    assert table["head"].moved == 7
    assert all(row.moved == 0 for kind, row in table.items() if kind not in ("attention", "head"))
    size = sum(float(before[n].double().square().sum()) for n in before
               if role_of(model).get(n) and role_of(model)[n].kind == "attention")  # fmt: skip
    assert table["attention"].distance == pytest.approx(1e-3 / size**0.5, rel=1e-3)
