"""The training maths of the dVAE against closed forms, and that training on photographs works."""

import math

import pytest
import torch
from torch import Tensor

from mimkit.random import Purpose, torch_generator
from mimkit.tokenizers._dvae_model import make_dvae, map_pixels
from mimkit.tokenizers._dvae_training import (
    DvaeTrainee,
    imbalance,
    kl_to_uniform,
    logit_laplace_log_density,
    relaxed_words,
    revive_words,
    spread_words,
    update_average,
)
from mimkit.train.schedule import cosine


def gumbel(*, seed: int = 0) -> torch.Generator:
    return torch_generator(Purpose.GUMBEL, seed=seed)


@pytest.mark.parametrize(("mean", "log_scale"), [(0.0, 0.0), (1.5, -1.0), (-2.0, -0.3)])
def test_logit_laplace_integrates_to_one(mean: float, log_scale: float) -> None:
    # Integrated over y = logit x, where dx = x (1 - x) dy: nothing is lost at the ends.
    logit = torch.linspace(-40, 40, 400_001, dtype=torch.float64)
    pixel = torch.sigmoid(logit)
    inside = (pixel > 1e-12) & (pixel < 1 - 1e-12)
    logit, pixel = logit[inside], pixel[inside]
    log_density = logit_laplace_log_density(
        pixel, torch.tensor(mean).double(), torch.tensor(log_scale).double()
    )
    mass = torch.trapezoid(log_density.exp() * pixel * (1 - pixel), logit)
    assert mass.item() == pytest.approx(1, abs=1e-5)


def test_logit_laplace_equals_torch_distributions() -> None:
    draw = torch.Generator().manual_seed(0)
    pixel = map_pixels(torch.rand(2, 3, 4, 4, generator=draw))
    mean, log_scale = torch.randn(2, 2, 3, 4, 4, generator=draw)
    laplace = torch.distributions.Laplace(mean, log_scale.exp())
    sigmoid = torch.distributions.transforms.SigmoidTransform()
    expected = torch.distributions.TransformedDistribution(laplace, [sigmoid]).log_prob(pixel)
    torch.testing.assert_close(logit_laplace_log_density(pixel, mean, log_scale), expected)


def test_kl_to_uniform_at_its_ends() -> None:
    assert kl_to_uniform(torch.full((1, 512, 2, 2), 3.0)).abs().max() < 1e-5
    certain_BVyx = torch.zeros(1, 512, 2, 2)
    certain_BVyx[:, 7] = 100
    torch.testing.assert_close(kl_to_uniform(certain_BVyx), torch.full((1, 2, 2), math.log(512)))


def test_imbalance_at_its_ends() -> None:
    one_hot_BVyx = 200 * torch.eye(16).view(16, 16, 1, 1)  # every word wins one patch
    assert imbalance(one_hot_BVyx).item() == pytest.approx(0, abs=1e-5)
    assert kl_to_uniform(one_hot_BVyx).mean().item() == pytest.approx(math.log(16))
    same_BVyx = one_hot_BVyx[:1].expand(16, 16, 1, 1).clone().requires_grad_()
    total = imbalance(same_BVyx)
    assert total.item() == pytest.approx(math.log(16))
    total.backward()
    assert same_BVyx.grad is not None and same_BVyx.grad.isfinite().all()


def test_spread_words_puts_many_words_in_use(photos: Tensor) -> None:
    dvae = make_dvae(width=16, blocks=1, vocabulary=64, generator=gumbel())
    with torch.no_grad():
        before = len(dvae.logits(photos).argmax(1).unique())
        spread_words(dvae, photos, deviation=3.0)
        logits_BVyx = dvae.logits(photos)
    torch.testing.assert_close(logits_BVyx.mean((0, 2, 3)), torch.zeros(64), atol=1e-3, rtol=0)
    torch.testing.assert_close(logits_BVyx.std((0, 2, 3)), torch.full((64,), 3.0))
    assert len(logits_BVyx.argmax(1).unique()) > max(30, before)


def test_relaxed_words_are_a_function_of_the_generator() -> None:
    logits_BVyx = torch.randn(2, 16, 3, 3, generator=torch.Generator().manual_seed(0))

    def draw(logits_BVyx: Tensor, *, seed: int) -> Tensor:
        return relaxed_words(logits_BVyx, temperature=0.5, generator=gumbel(seed=seed))

    first_BVyx = draw(logits_BVyx, seed=0)
    torch.testing.assert_close(first_BVyx.sum(1), torch.ones(2, 3, 3))
    assert torch.equal(first_BVyx, draw(logits_BVyx, seed=0))
    assert not torch.equal(first_BVyx, draw(logits_BVyx, seed=1))
    other_layout = logits_BVyx.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(draw(other_layout, seed=0), first_BVyx)


def test_gumbel_argmax_samples_the_softmax() -> None:
    """The Gumbel-max trick: the largest word is a sample of the categorical distribution."""
    share_V = torch.tensor([0.6, 0.3, 0.1])
    logits_BVyx = share_V.log().view(1, 3, 1, 1).expand(1, 3, 200, 200)
    word_Byx = relaxed_words(logits_BVyx, temperature=1 / 16, generator=gumbel()).argmax(1)
    found_V = torch.bincount(word_Byx.flatten()) / word_Byx.numel()
    torch.testing.assert_close(found_V, share_V, atol=0.01, rtol=0)


def test_loss_is_in_the_paper_s_unit() -> None:
    """Sums over pixels and tokens, divided by h * w * 3, with the KL weighted (beta / 192)."""
    dvae = make_dvae(width=8, blocks=1, vocabulary=16, generator=gumbel())
    view_BChw = torch.rand(1, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    loss, metrics = DvaeTrainee(dvae)(view_BChw, generator=gumbel(), temperature=1.0, kl_weight=6.6)
    with torch.no_grad():
        logits_BVyx = dvae.logits(view_BChw)
        word_BVyx = relaxed_words(logits_BVyx, temperature=1.0, generator=gumbel())
        log_density = logit_laplace_log_density(
            map_pixels(view_BChw), *dvae.pixel_parameters(word_BVyx)
        )
        elbo = log_density.sum() - 6.6 * kl_to_uniform(logits_BVyx).sum()
    torch.testing.assert_close(loss.detach(), -elbo / (16 * 24 * 3))
    balanced, _ = DvaeTrainee(dvae)(
        view_BChw, generator=gumbel(), temperature=1.0, kl_weight=6.6, balance_weight=19.2
    )
    torch.testing.assert_close(balanced - loss, 0.1 * metrics["imbalance"])


def test_every_parameter_is_used() -> None:
    trainee = DvaeTrainee(make_dvae(width=8, blocks=1, vocabulary=16, generator=gumbel()))
    loss, _ = trainee(torch.rand(2, 3, 16, 16), generator=gumbel(), temperature=1.0, kl_weight=1.0)
    loss.backward()
    assert all(parameter.grad is not None for parameter in trainee.parameters())


@pytest.mark.parametrize(
    ("fraction", "temperature", "kl_weight"),
    [(0.0, 1.0, 0.0), (0.05, 0.977058, 3.3), (0.25, 0.53125, 6.6), (0.5, 0.0625, 6.6)],
)
def test_schedules_are_cosines_over_a_share_of_the_run(
    fraction: float, temperature: float, kl_weight: float
) -> None:
    assert cosine(fraction / 0.5, 1.0, 1 / 16) == pytest.approx(temperature, abs=1e-6)
    assert cosine(fraction / 0.1, 0.0, 6.6) == pytest.approx(kl_weight)


def test_average_forgets_the_initial_weights_and_then_moves_slowly() -> None:
    average = make_dvae(width=8, blocks=1, vocabulary=16, generator=gumbel())
    dvae = make_dvae(width=8, blocks=1, vocabulary=16, generator=gumbel(seed=1))
    start, end = average.encoder.blocks.input.w.clone(), dvae.encoder.blocks.input.w
    update_average(average, dvae, decay=0.999, step=0)
    torch.testing.assert_close(average.encoder.blocks.input.w, 0.1 * start + 0.9 * end)
    start = average.encoder.blocks.input.w.clone()
    update_average(average, dvae, decay=0.999, step=100_000)
    torch.testing.assert_close(average.encoder.blocks.input.w, 0.999 * start + 0.001 * end)


def test_words_that_nobody_uses_start_again_beside_the_most_used() -> None:
    """Both of a pair, together, have the probability that the source had alone."""
    dvae = make_dvae(width=8, blocks=1, vocabulary=16, generator=gumbel())
    average = make_dvae(width=8, blocks=1, vocabulary=16, generator=gumbel(seed=1))
    trainee = DvaeTrainee(dvae)
    trainee.share_V.copy_(torch.tensor([0.001, 0.4, 0.3, 0.001] + 12 * [0.298 / 12]))
    view_BChw = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    before = {net: net.logits(view_BChw).detach().softmax(1) for net in (dvae, average)}
    columns = {net: net.decoder.blocks.input.w.detach().clone() for net in (dvae, average)}
    count_V = 1000 * trainee.share_V
    revived = revive_words(trainee, count_V, average=average, revive=0.1, generator=gumbel())
    assert revived == 2
    torch.testing.assert_close(trainee.share_V[:4], torch.tensor([0.2, 0.2, 0.15, 0.15]))
    for net, word_BVyx in before.items():
        after_BVyx = net.logits(view_BChw).detach().softmax(1)
        for dead, source in ((0, 1), (3, 2)):
            pair_Byx = after_BVyx[:, dead] + after_BVyx[:, source]
            # what the dead had is gone, and the pair is a tenth apart
            torch.testing.assert_close(pair_Byx, word_BVyx[:, source], rtol=0.25, atol=0)
            column_D = columns[net][:, source, 0, 0]
            apart = net.decoder.blocks.input.w.detach()[:, dead, 0, 0] - column_D
            assert float(apart.norm() / column_D.norm()) == pytest.approx(0.1, rel=1e-4)
        assert torch.equal(columns[net][:, 4:], net.decoder.blocks.input.w[:, 4:])


def test_every_word_that_is_used_stays_and_none_starts_again_at_zero() -> None:
    trainee = DvaeTrainee(make_dvae(width=8, blocks=1, vocabulary=16, generator=gumbel()))
    start = {name: weight.clone() for name, weight in trainee.dvae.state_dict().items()}
    count_V = torch.tensor([1600.0] + 15 * [0.0])
    for _ in range(200):
        revived = revive_words(
            trainee, count_V, average=trainee.dvae, revive=0.0, generator=gumbel()
        )
        assert revived == 0
    assert all(torch.equal(start[name], w) for name, w in trainee.dvae.state_dict().items())
    assert trainee.share_V[0] == pytest.approx(1 - 15 / 16 * 0.99**200, rel=1e-4)


def test_tokens_that_went_forward_are_counted_once() -> None:
    trainee = DvaeTrainee(make_dvae(width=8, blocks=1, vocabulary=16, generator=gumbel()))
    view_BChw = torch.rand(3, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        trainee(view_BChw, generator=gumbel(), temperature=1.0, kl_weight=0.0)
    target_M = trainee.dvae.logits(view_BChw).argmax(1).flatten()
    expected_V = 2 * torch.bincount(target_M, minlength=16).float()
    assert torch.equal(trainee.taken_counts(), expected_V)
    assert torch.equal(trainee.taken_counts(), torch.zeros(16))
    assert "count_V" not in trainee.state_dict() and "share_V" in trainee.state_dict()


def test_training_on_photographs_lowers_the_error(training_crops: Tensor) -> None:
    """60 steps at width 16 bring the pixel error below 0.7 of its start (measured: 0.60)."""
    generator = gumbel()
    dvae = make_dvae(width=16, blocks=1, vocabulary=64, generator=generator)
    trainee = DvaeTrainee(dvae.to(memory_format=torch.channels_last))
    optimizer = torch.optim.AdamW(trainee.parameters(), lr=3e-3)
    maes = []
    for _ in range(60):
        index_B = torch.randint(len(training_crops), (16,), generator=generator)
        loss, metrics = trainee(
            training_crops[index_B], generator=generator, temperature=1.0, kl_weight=0.0
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        maes.append(metrics["mae"].item())
    assert sum(maes[-5:]) < 0.7 * sum(maes[:5]), maes
