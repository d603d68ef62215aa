"""What finetuning makes of encoders of others and of ours: positions, biases, heads."""

from pathlib import Path

import pytest
import torch
from layouts import beit_pretraining, deit3, mae, save, three_things

from mimkit.config import FinetuneConfig
from mimkit.data.class_labels import Classes
from mimkit.errors import UserError
from mimkit.export._pretrained import Normalisation, save_encoder
from mimkit.finetuning_parts import load_start, make_classifier
from mimkit.importing import import_weights
from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.init import initialise
from mimkit.models.roles import learning_rate_scales, role_of
from mimkit.models.stems import STEMS

CLASSES = Classes(5, ())


def _config(init: Path, *, size: object = 64, model: object = None, train: object = None
            ) -> FinetuneConfig:  # fmt: skip
    return FinetuneConfig.model_validate({
        "init": str(init), "data": {"image_size": size}, "model": model or {},
        "train": {"steps": 1, **(train or {})},
    })  # fmt: skip


@pytest.mark.parametrize("make", [beit_pretraining, mae, deit3, three_things])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_published_checkpoints_become_classifiers(make, pooling: str, tmp_path: Path) -> None:
    """Also at another size that is no square; the encoder is their own at its own size."""
    layout = make()
    file = save(layout.weights, tmp_path / "theirs.pth")
    if layout.heads is not None:  # which the weights do not say
        found = import_weights(file, heads=layout.heads)
        file = tmp_path / "ours.safetensors"
        pixels = Normalisation(found.mean, found.std)
        save_encoder(file, found.encoder, normalisation=pixels, about={})
    start = load_start(_config(file, model={"per_block_bias": False}))
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(start.model(images), layout.tokens(images), rtol=1e-4, atol=1e-4)
    config = _config(file, size=[64, 96], model={"pooling": pooling})
    model = make_classifier(load_start(config), config, CLASSES)
    assert model(torch.rand(2, 3, 64, 96)).shape == (2, 5)


def _exported(folder: Path, positions: str, *, grid: tuple[int, int] = (4, 4)) -> Path:
    encoder = Encoder(width=32, heads=4, depth=2, grid=grid, positions=positions)
    model = ImageEncoder(STEMS["linear"](width=32, patch_size=16), encoder)
    initialise(model, seed=0)
    with torch.no_grad():
        for bias in model.encoder.relative:
            bias.table.normal_(generator=torch.Generator().manual_seed(0))
    path = folder / "ours.safetensors"
    save_encoder(path, model, normalisation=Normalisation((0.5,) * 3, (0.5,) * 3), about={})
    return path


@pytest.mark.parametrize("positions", ["relative", "relative_shared"])
@pytest.mark.parametrize("per_block", [True, False])
def test_shared_and_own_biases_in_all_combinations(
    positions: str, per_block: bool, tmp_path: Path
) -> None:
    """Own pretraining, then finetuning: microsoft/unilm issue 1332 was a KeyError here."""
    config = _config(_exported(tmp_path, positions), model={"per_block_bias": per_block})
    start = load_start(config)
    model = make_classifier(start, config, CLASSES)
    own = positions == "relative" or per_block
    assert model.encoder.positions == ("relative" if own else "relative_shared")
    assert len(model.encoder.relative) == (2 if own else 1)
    depths = {role.depth for n, role in role_of(model).items() if n.endswith(".table")}
    assert depths == ({1, 2} if own else {0})
    scales = learning_rate_scales(model, decay=0.5)
    assert max(scales[n] for n in scales if n.endswith(".table")) == (0.5 if own else 0.125)
    model(torch.rand(2, 3, 64, 64)).sum().backward()
    assert all(bias.table.grad is not None for bias in model.encoder.relative)


def test_biases_are_resized_by_the_rule_of_the_configuration(tmp_path: Path) -> None:
    file = _exported(tmp_path, "relative_shared")
    tables = {}
    for rule in ("bicubic", "geometric"):
        start = load_start(_config(file, size=96, model={"resize": rule}))
        tables[rule] = start.model.encoder.relative[0].table
        assert start.model.encoder.grid == (6, 6)
        assert any("4x4 -> 6x6" in note for note in start.notes)
        assert any("copied to every block" in note for note in start.notes)
    assert tables["bicubic"].shape == tables["geometric"].shape == (11 * 11 + 3, 4)
    assert not torch.equal(tables["bicubic"], tables["geometric"])
    smaller = _config(file, size=32, model={"resize": "geometric"})
    with pytest.raises(UserError, match=r"set model\.resize=bicubic"):
        load_start(smaller)


def test_images_that_the_checkpoints_patches_do_not_divide_are_refused(tmp_path: Path) -> None:
    """A configuration for patches of 14 and a checkpoint with patches of 16."""
    config = _config(_exported(tmp_path, "absolute"), size=98)
    with pytest.raises(UserError, match="98x98 pixels does not divide into patches of 16"):
        load_start(config)


def test_weights_start_as_they_were(tmp_path: Path) -> None:
    """A head is drawn, the rest is the encoder's; the copy for a delta is apart from it."""
    config = _config(_exported(tmp_path, "absolute"), train={"roles": ["attention"]})
    start = load_start(config)
    model = make_classifier(start, config, CLASSES)
    assert start.weights is not None
    for name, weight in model.image_encoder.state_dict().items():
        assert torch.equal(weight, start.weights[name])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {role_of(model)[name].kind for name in trained} == {"attention", "head"}
    assert model.still_stem
    with torch.no_grad():
        model.encoder.cls_token.add_(1)
    assert not torch.equal(start.weights["encoder.cls_token"], model.encoder.cls_token)
