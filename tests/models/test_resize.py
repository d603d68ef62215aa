"""Positions of another grid: the same grid changes nothing; smooth ones survive a round trip."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed

from mimkit.errors import UserError
from mimkit.models.encoder import Encoder, ImageEncoder
from mimkit.models.geometric import resize_geometric
from mimkit.models.init import initialise
from mimkit.models.positions import RelativePositionBias
from mimkit.models.resize import resize_absolute, resize_relative, resized
from mimkit.models.stems import STEMS

GRIDS = [((14, 14), (24, 24)), ((14, 14), (18, 18)), ((14, 12), (24, 20)), ((6, 4), (9, 8))]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def smooth(rows: int, columns: int, *, channels: int = 3) -> torch.Tensor:
    """(rows * columns, channels): half a wave down, one across, of another phase a channel."""
    y = (torch.arange(rows) + 0.5)[:, None, None] / rows
    x = (torch.arange(columns) + 0.5)[None, :, None] / columns
    phase = torch.arange(channels)
    return (torch.sin(math.pi * y + phase) * torch.cos(2 * math.pi * x)).flatten(0, 1)


def absolute(grid: tuple[int, int]) -> torch.Tensor:
    return torch.cat([noise(1, 3), smooth(*grid)])[None]


def relative(grid: tuple[int, int]) -> torch.Tensor:
    return torch.cat([smooth(*(2 * side - 1 for side in grid)), noise(3, 3)])


def model(positions: str, grid: tuple[int, int] = (4, 6)) -> ImageEncoder:
    encoder = Encoder(width=32, heads=4, depth=2, grid=grid, positions=positions)
    made = ImageEncoder(STEMS["linear"](width=32, patch_size=8), encoder)
    initialise(made, seed=0)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "relative" in name or "pos_embed" in name:
                weight.add_(noise(*weight.shape))
    return made.eval()


@pytest.mark.parametrize("grid", [(14, 14), (3, 5)])
def test_the_same_grid_changes_nothing(grid) -> None:
    positions, table = absolute(grid), relative(grid)
    assert resize_absolute(positions, old=grid, new=grid) is positions
    assert resize_relative(table, old=grid, new=grid) is table
    same = model("absolute", grid)
    assert resized(same, grid) is same


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_smooth_positions_survive_up_and_down(old, new) -> None:
    """Amplitude 1. Edges, beyond which nothing is known, are the worst; few samples a wave, too."""
    bound = 0.05 if min(old) > 10 else 0.2
    positions, table = absolute(old), relative(old)
    up, up_table = (
        resize_absolute(positions, old=old, new=new),
        resize_relative(table, old=old, new=new),
    )
    assert up.shape == absolute(new).shape
    assert up_table.shape == relative(new).shape
    torch.testing.assert_close(up, absolute(new), rtol=0, atol=bound)
    torch.testing.assert_close(up_table, relative(new), rtol=0, atol=bound)
    back = resize_absolute(up, old=new, new=old)
    back_table = resize_relative(up_table, old=new, new=old)
    torch.testing.assert_close(back, positions, rtol=0, atol=bound)
    torch.testing.assert_close(back_table, table, rtol=0, atol=bound)


def test_what_belongs_to_the_class_token_is_kept() -> None:
    positions, table = noise(1, 1 + 24, 3), noise(7 * 11 + 3, 3)
    assert torch.equal(resize_absolute(positions, old=(4, 6), new=(5, 9))[:, 0], positions[:, 0])
    assert torch.equal(resize_relative(table, old=(4, 6), new=(5, 9))[-3:], table[-3:])


def test_absolute_positions_are_resized_by_timms_rule() -> None:
    positions = noise(1, 1 + 24, 5)
    theirs = resample_abs_pos_embed(positions, new_size=[6, 5], old_size=[4, 6])
    assert torch.equal(resize_absolute(positions, old=(4, 6), new=(6, 5)), theirs)


def test_heads_do_not_meet_and_a_middle_stays_in_the_middle() -> None:
    """A bias by distance alone is one for the new grid too, largest where the offset is zero."""
    table = torch.zeros(7 * 7 + 3, 2)
    offset = torch.arange(-3, 4)
    table[:-3, 0] = torch.exp(-(offset[:, None] ** 2 + offset[None] ** 2) / 8.0).flatten()
    new = resize_relative(table, old=(4, 4), new=(7, 7))[:-3].view(13, 13, 2)
    assert torch.equal(new[..., 1], torch.zeros(13, 13))
    assert divmod(int(new[..., 0].argmax()), 13) == (6, 6)
    torch.testing.assert_close(new[..., 0], new[..., 0].flip(0, 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("positions", ["absolute", "relative", "relative_shared", "none"])
def test_an_encoder_of_another_size_shares_all_but_its_positions(positions) -> None:
    source = model(positions)
    before = {name: weight.clone() for name, weight in source.state_dict().items()}
    twin = resized(source, (6, 5))
    images = noise(2, 3, 48, 40)
    with torch.no_grad():
        assert twin(images).shape == (2, 31, 32)
        with pytest.raises(ValueError, match="built for a grid of 4x6"):
            source(images)
    ours = dict(source.named_parameters())
    own = {name for name, weight in twin.named_parameters() if weight is not ours[name]}
    assert own == {name for name in ours if "pos_embed" in name or "relative" in name}
    assert all(torch.equal(before[name], weight) for name, weight in source.state_dict().items())


@pytest.mark.parametrize("positions", ["relative", "relative_shared"])
def test_a_resized_table_is_read_by_the_index_of_the_new_grid(positions) -> None:
    twin = resized(model(positions), (6, 5))
    expected = RelativePositionBias(grid=(6, 5), heads=4)
    for bias in twin.encoder.relative:
        assert torch.equal(bias.index, expected.index)
        with torch.no_grad():
            expected.table.copy_(bias.table)
            assert torch.equal(bias(), expected())


def wavy(side: int, heads: int) -> torch.Tensor:
    """A table of numbers by formula, for square grids of `side` patches, without its last rows."""
    y, x = torch.meshgrid(*[torch.arange(1.0 - side, side, dtype=torch.float64) / (side - 1)] * 2,
                          indexing="ij")  # fmt: skip
    bump = 0.3 * torch.exp(-9 * (x * x + y * y))
    maps = [torch.sin(3 * x + h) * torch.cos(2 * y - h) + bump * (h + 1) for h in range(heads)]
    return torch.stack(maps, -1).flatten(0, 1).float()


@pytest.mark.parametrize(("old", "new", "heads"), [(4, 7, 3), (14, 24, 1)])
def test_the_geometric_rule_is_beits(old: int, new: int, heads: int) -> None:
    """Within 1e-4 of stored numbers, which another routine made (see the file's metadata)."""
    expected = load_file(Path(__file__).parent / "beit_geometric.safetensors")[f"to_{new}"]
    table = torch.cat([wavy(old, heads), noise(3, heads)])
    sized = resize_geometric(table, old=(old, old), new=(new, new))
    torch.testing.assert_close(sized[:-3], expected, rtol=0, atol=1e-4)
    assert torch.equal(sized[-3:], table[-3:])
    plain = resize_relative(table, old=(old, old), new=(new, new))
    assert (plain[:-3] - expected).abs().max() > 0.05  # they are two rules


def test_the_geometric_rule_keeps_the_middle_dense() -> None:
    """Neighbouring offsets keep their numbers, as a bicubic stretch does not; not square."""
    old, new = (14, 10), (24, 18)
    table = torch.cat([noise(27 * 19, 2), noise(3, 2)])
    sized = resize_geometric(table, old=old, new=new)[:-3].view(47, 35, 2)
    before = table[:-3].view(27, 19, 2)
    torch.testing.assert_close(sized[22:25, 16:19], before[12:15, 8:11], rtol=0, atol=1e-5)


def test_the_geometric_rule_is_for_larger_images() -> None:
    with pytest.raises(UserError, match=r"from 14x14 to 12x14 patches; set model\.resize=bicubic"):
        resize_geometric(torch.zeros(27 * 27 + 3, 2), old=(14, 14), new=(12, 14))


@pytest.mark.parametrize("positions", ["relative", "relative_shared"])
def test_an_encoder_is_resized_by_the_rule_that_is_asked_for(positions: str) -> None:
    source = model(positions)
    twin = resized(source, (6, 8), relative=resize_geometric)
    expected = resize_geometric(source.encoder.relative[0].table, old=(4, 6), new=(6, 8))
    assert torch.equal(twin.encoder.relative[0].table, expected)
