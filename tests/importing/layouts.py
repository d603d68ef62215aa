"""Models of others with random weights, in the layouts in which their authors save them."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file
from timm.models.beit import Beit
from timm.models.vision_transformer import ParallelThingsBlock, VisionTransformer
from torch import Tensor, nn

WIDTH, HEADS, DEPTH = 64, 4, 3
SIZES = {"embed_dim": WIDTH, "num_heads": HEADS, "depth": DEPTH}


@dataclass(frozen=True)
class Layout:
    """Weights under their authors' names, and the tokens that their authors' model gives.

    Attributes:
        scheme: by which it should be recognised.
        left_out: names that are no part of the encoder.
        encoder: settings that ours should have.
        heads: what the caller must say.
    """

    weights: Mapping[str, Tensor]
    tokens: Callable[[Tensor], Tensor]
    scheme: str
    encoder: Mapping[str, object]
    left_out: frozenset[str] = frozenset()
    heads: int | None = HEADS
    image_size: tuple[int, int] = (64, 64)
    wrapped: Mapping[str, object] = field(default_factory=dict)


def images(layout: Layout) -> Tensor:
    draw = torch.Generator().manual_seed(2)
    return torch.randn(2, 3, *layout.image_size, generator=draw)


def save(weights: Mapping[str, object], path: Path) -> Path:
    """By the suffix: safetensors, or as torch.save writes them."""
    if path.suffix == ".safetensors":
        tensors = {n: w.clone().contiguous() for n, w in weights.items() if isinstance(w, Tensor)}
        save_file(tensors, path)
    else:
        torch.save(dict(weights), path)
    return path


def training_checkpoint(weights: Mapping[str, Tensor]) -> dict[str, object]:
    """What the training scripts of MAE, DeiT and BEiT save: an optimizer and arguments besides."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "optimizer": optimizer.state_dict(),
        "epoch": 7,
        "args": Namespace(lr=1.5e-3, out=Path("out"), betas=(0.9, 0.999), name="beit", clip=None),
        "model": dict(weights),
    }


def disturbed(model: nn.Module) -> nn.Module:
    """Every weight away from where it starts, in eval mode."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.05)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(torch.randn(buffer.shape, generator=draw) * 0.1)
            if name.endswith("running_var"):
                buffer.mul_(1 + torch.rand(buffer.shape, generator=draw))
    return model.eval()


def _head(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With a classifier of 10 classes."""
    head = {"head.weight": torch.randn(10, WIDTH), "head.bias": torch.randn(10)}
    return {**{name: w for name, w in weights.items() if not name.startswith("head.")}, **head}


_HEAD = frozenset({"head.weight", "head.bias"})


def _timm(make: Callable[..., nn.Module] = VisionTransformer, **settings: object) -> nn.Module:
    return disturbed(make(**{"img_size": 64, "num_classes": 0, **SIZES, **settings}))


def timm_vit() -> Layout:
    model = _timm()
    settings = {"positions": "absolute", "qkv_bias": "qkv", "layer_scale": None}
    return Layout(_head(model.state_dict()), model.forward_features, "timm", settings, _HEAD)


def timm_vit_without_bias() -> Layout:
    model = _timm(qkv_bias=False)
    return Layout(model.state_dict(), model.forward_features, "timm", {"qkv_bias": "qv"})


def timm_vit_of_wide_images() -> Layout:
    model = _timm(patch_size=8, img_size=(32, 48))
    return Layout(model.state_dict(), model.forward_features, "timm", {"grid": (4, 6)},
                  image_size=(32, 48))  # fmt: skip


def timm_vit_pooled() -> Layout:
    model = _timm(global_pool="avg")
    weights = _head(model.state_dict())
    return Layout(weights, model.forward_features, "timm", {"final_norm": False},
                  _HEAD | {"fc_norm.weight", "fc_norm.bias"})  # fmt: skip


def timm_parallel() -> Layout:
    model = _timm(block_fn=ParallelThingsBlock, init_values=1e-5)
    return Layout(model.state_dict(), model.forward_features, "timm_parallel",
                  {"branches": 2, "layer_scale": 1e-5})  # fmt: skip


def dinov2() -> Layout:
    """timm's ViT has the names of DINOv2's own code, which saves a mask token too."""
    model = _timm(patch_size=14, img_size=70, init_values=1e-5)
    weights = {**model.state_dict(), "mask_token": torch.randn(1, WIDTH)}
    return Layout(weights, model.forward_features, "dinov2", {"layer_scale": 1e-5},
                  frozenset({"mask_token"}), image_size=(70, 70))  # fmt: skip


def dino_teacher() -> Layout:
    """DINO saves student and teacher, each behind `backbone.` and with a head."""
    model = _timm()
    teacher = {f"backbone.{name}": weight for name, weight in model.state_dict().items()}
    teacher["head.mlp.0.weight"] = torch.randn(8, WIDTH)
    wrapped = {"student": {f"module.{name}": -weight for name, weight in teacher.items()},
               "teacher": teacher, "epoch": 3}  # fmt: skip
    return Layout(teacher, model.forward_features, "timm", {"qkv_bias": "qkv"},
                  frozenset({"head.mlp.0.weight"}), wrapped=wrapped)  # fmt: skip


def mae() -> Layout:
    model = _timm()
    decoder = VisionTransformer(img_size=64, num_classes=0, embed_dim=32, num_heads=2, depth=1)
    extra = {f"decoder_{name}": weight for name, weight in decoder.state_dict().items()
             if name.startswith(("blocks", "norm", "pos_embed"))}  # fmt: skip
    extra |= {"decoder_embed.weight": torch.randn(32, WIDTH), "decoder_embed.bias": torch.ones(32),
              "decoder_pred.weight": torch.randn(768, 32), "decoder_pred.bias": torch.ones(768),
              "mask_token": torch.randn(1, 1, 32)}  # fmt: skip
    weights = {**model.state_dict(), **extra}
    return Layout(weights, model.forward_features, "mae", {"positions": "absolute"},
                  frozenset(extra), wrapped=training_checkpoint(weights))  # fmt: skip


def deit3() -> Layout:
    """196 positions: the class token joins behind them. LayerScale is called gamma_1."""
    model = _timm(no_embed_class=True, init_values=1e-4)
    assert model.pos_embed.shape[1] == 16
    weights = {name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): weight
               for name, weight in model.state_dict().items()}  # fmt: skip
    weights = _head(weights)
    return Layout(weights, model.forward_features, "deit3",
                  {"positions": "absolute", "layer_scale": 1e-5}, _HEAD,
                  wrapped={"model": weights})  # fmt: skip


def deit3_in_timm() -> Layout:
    model = _timm(no_embed_class=True, init_values=1e-4)
    return Layout(model.state_dict(), model.forward_features, "dinov2", {"positions": "absolute"})


def beit_pretraining(*, depth: int = DEPTH) -> Layout:
    """unilm's run_beit_pretraining: one bias for all blocks, a mask token, a head of words."""
    model = _timm(Beit, init_values=0.1, use_abs_pos_emb=False, use_shared_rel_pos_bias=True,
                  global_pool="token", depth=depth)  # fmt: skip
    extra = {"mask_token": torch.randn(1, 1, WIDTH), "lm_head.weight": torch.randn(9, WIDTH),
             "lm_head.bias": torch.randn(9),
             "rel_pos_bias.relative_position_index": torch.arange(289).view(17, 17)}  # fmt: skip
    weights = {**model.state_dict(), **extra}
    settings = {"positions": "relative_shared", "qkv_bias": "qv", "layer_scale": 1e-5}
    return Layout(weights, model.forward_features, "beit", settings, frozenset(extra), heads=None,
                  wrapped=training_checkpoint(weights))  # fmt: skip


def beit_v2_pretraining() -> Layout:
    """As BEiT's, with blocks of the class token's head behind it."""
    layout = beit_pretraining()
    extra = {f"cls_pt_layers.0.{part}": torch.randn(WIDTH) for part in ("gamma_1", "norm1.weight")}
    weights = {**layout.weights, **extra}
    return Layout(weights, layout.tokens, "beit", layout.encoder, layout.left_out | set(extra),
                  heads=None, wrapped={"model": weights})  # fmt: skip


def beit_finetuned() -> Layout:
    """unilm's run_class_finetuning: one bias a block, no norm behind the blocks, fc_norm."""
    model = _timm(Beit, init_values=0.1, use_abs_pos_emb=False, use_rel_pos_bias=True)
    index = {f"blocks.{n}.attn.relative_position_index": torch.arange(289).view(17, 17)
             for n in range(DEPTH)}  # fmt: skip
    weights = {**_head(model.state_dict()), **index}
    left_out = _HEAD | set(index) | {"fc_norm.weight", "fc_norm.bias"}
    settings = {"positions": "relative", "final_norm": False}
    return Layout(weights, model.forward_features, "beit", settings, left_out, heads=None,
                  wrapped={"module": weights})  # fmt: skip


def beit_absolute() -> Layout:
    """The released weights of the paper: position embeddings, no LayerScale."""
    model = _timm(Beit, init_values=None, use_abs_pos_emb=True, global_pool="token")
    return Layout(model.state_dict(), model.forward_features, "beit",
                  {"positions": "absolute", "layer_scale": None})  # fmt: skip


class _ThreeThingsBlock(nn.Module):
    """deit's models_v2.Layer_scale_init_Block_paralx2, in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        block = partial(timm.models.vision_transformer.Block, WIDTH, HEADS, qkv_bias=True)
        for attn, mlp in (("", ""), ("1", "1")):
            parts = block(norm_layer=partial(nn.LayerNorm, eps=1e-6))
            setattr(self, f"norm1{attn}", parts.norm1)
            setattr(self, f"attn{attn}", parts.attn)
            setattr(self, f"norm2{mlp}", parts.norm2)
            setattr(self, f"mlp{mlp}", parts.mlp)
        for name in ("gamma_1", "gamma_1_1", "gamma_2", "gamma_2_1"):
            self.register_parameter(name, nn.Parameter(torch.full((WIDTH,), 1e-4)))

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.gamma_1 * self.attn(self.norm1(x))
             + self.gamma_1_1 * self.attn1(self.norm11(x)))  # fmt: skip
        return (x + self.gamma_2 * self.mlp(self.norm2(x))
                + self.gamma_2_1 * self.mlp1(self.norm21(x)))  # fmt: skip


class _HmlpStem(nn.Module):
    """deit's hMLP_stem."""

    def __init__(self) -> None:
        super().__init__()
        quarter = WIDTH // 4
        self.proj = nn.Sequential(
            nn.Conv2d(3, quarter, 4, stride=4), nn.BatchNorm2d(quarter), nn.GELU(),
            nn.Conv2d(quarter, quarter, 2, stride=2), nn.BatchNorm2d(quarter), nn.GELU(),
            nn.Conv2d(quarter, WIDTH, 2, stride=2), nn.BatchNorm2d(WIDTH),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class _ThreeThings(nn.Module):
    """deit's models_v2.vit_models: positions of the patches only, the class token joins behind."""

    def __init__(self, stem: nn.Module) -> None:
        super().__init__()
        self.patch_embed = stem
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, 16, WIDTH))
        self.blocks = nn.ModuleList(_ThreeThingsBlock() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch_embed(image) + self.pos_embed
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def three_things(stem: nn.Module | None = None) -> Layout:
    patch_embed = timm.layers.PatchEmbed(img_size=64, embed_dim=WIDTH)
    model = disturbed(_ThreeThings(stem or patch_embed))
    settings = {"branches": 2, "layer_scale": 1e-5, "qkv_bias": "qkv"}
    return Layout(model.state_dict(), model, "3things", settings, _HEAD)


def three_things_hmlp() -> Layout:
    return three_things(_HmlpStem())


TIMM = [timm_vit, timm_vit_without_bias, timm_vit_of_wide_images, timm_vit_pooled, timm_parallel,
        dinov2, dino_teacher, mae, deit3, deit3_in_timm, beit_pretraining, beit_v2_pretraining,
        beit_finetuned, beit_absolute, three_things, three_things_hmlp]  # fmt: skip

_HF_SIZES = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": DEPTH,
             "intermediate_size": 4 * WIDTH, "image_size": 64, "patch_size": 16,
             "layer_norm_eps": 1e-6}  # fmt: skip


def _hf(
    kind: str,
    scheme: str,
    settings: Mapping[str, object],
    *,
    inner: str = "",
    left_out: frozenset[str] = frozenset(),
    **config: object,
) -> tuple[Layout, nn.Module]:
    """A model of transformers, with its names as within the model, and the model itself."""
    import transformers

    family = next(f for f in ("Beit", "ViT", "Dinov2") if kind.startswith(f))
    made = getattr(transformers, f"{family}Config")(**{**_HF_SIZES, **config})
    model = disturbed(getattr(transformers, kind)(made))
    base = getattr(model, inner) if inner else model

    @torch.no_grad()
    def tokens(image: Tensor) -> Tensor:
        found = base(image).last_hidden_state
        return model.layernorm(found) if kind == "BeitForMaskedImageModeling" else found

    heads = None if "relative" in str(settings.get("positions")) else HEADS
    layout = Layout(model.state_dict(), tokens, scheme, settings, left_out, heads)
    return layout, model


_POOLER = frozenset({"pooler.layernorm.weight", "pooler.layernorm.bias"})
_RELATIVE = {"positions": "relative", "final_norm": False, "qkv_bias": "qv"}

HF = {
    "BeitModel": lambda: _hf("BeitModel", "hf_beit", _RELATIVE, left_out=_POOLER,
                             use_relative_position_bias=True),
    "BeitForMaskedImageModeling": lambda: _hf(
        "BeitForMaskedImageModeling", "hf_beit", {"positions": "relative_shared"},
        inner="beit", use_shared_relative_position_bias=True, use_mask_token=True,
        vocab_size=9, left_out=frozenset({"embeddings.mask_token", "lm_head.weight",
                                          "lm_head.bias"})),
    "ViTModel": lambda: _hf("ViTModel", "hf_vit", {"positions": "absolute", "qkv_bias": "qkv"},
                            left_out=frozenset({"pooler.dense.weight", "pooler.dense.bias"})),
    "Dinov2Model": lambda: _hf("Dinov2Model", "hf_dinov2", {"layer_scale": 1e-5},
                               left_out=frozenset({"embeddings.mask_token"})),
}  # fmt: skip
