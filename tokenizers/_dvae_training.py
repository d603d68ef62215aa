"""What a dVAE is trained on: Gumbel-softmax words, logit-Laplace pixels, KL to a uniform prior.

Source: Ramesh et al. 2021 ("Zero-Shot Text-to-Image Generation"), section 2.1, A.2, A.3.
Everything here is fp32: dall_e's convolutions refuse other inputs.
"""

import math

import torch
from torch import Tensor, nn

from mimkit.tokenizers._dvae_model import DOWNSAMPLING, Dvae, map_pixels, reconstruct
from mimkit.tokenizers._revival import dead_and_sources, near

SHARE_DECAY = 0.99  # of a word's share of the tokens: it remembers about a hundred updates


class DvaeTrainee(nn.Module):
    """A dVAE with its loss as `forward`, for any loop that wants a module that gives a scalar.

    `share_V`, how much each word was used lately, travels with it in checkpoints; the counts of the
    tokens that went forward are taken after each update, before a checkpoint is written.
    """

    share_V: Tensor
    count_V: Tensor

    def __init__(self, dvae: Dvae) -> None:
        super().__init__()
        self.dvae = dvae
        words = dvae.vocabulary
        self.register_buffer("share_V", torch.full((words,), 1 / words))
        self.register_buffer("count_V", torch.zeros(words), persistent=False)

    def forward(
        self,
        view_BChw: Tensor,
        *,
        generator: torch.Generator,
        temperature: float,
        kl_weight: float,
        balance_weight: float = 0.0,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Negative ELBO plus balance, and what it is made of.

        All terms are in nats divided by h * w * 3, as in the paper: the sum over the pixels
        becomes a mean, and the sum of the KL over the h/8 * w/8 tokens becomes the mean KL of a
        token / 192. So a weight of 6.6 weighs a token's mean KL by 6.6 / 192 = 0.034.

        Args:
            view_BChw: float32 in [0, 1].
            generator: of the Gumbel noise, on the device of the view.
            temperature: of the relaxation.
            kl_weight: of the KL term.
            balance_weight: of `imbalance`, ours; 0 is the paper's loss. A small dVAE in a
                short run collapses without it: after 400 steps 14 of 512 words were in use, and
                438 with a weight of 100 and `spread_words`.

        Returns:
            The loss, and detached scalars: `likelihood` (negative log likelihood, nats a
            pixel channel), `kl` and `imbalance` (nats a token), `mae` (of the relaxed
            reconstruction, in [0, 1]).
        """
        logits_BVyx = self.dvae.logits(view_BChw)
        self._count(logits_BVyx.detach())
        word_BVyx = relaxed_words(logits_BVyx, temperature=temperature, generator=generator)
        mean_B3hw, log_scale_B3hw = self.dvae.pixel_parameters(word_BVyx)
        log_density = logit_laplace_log_density(map_pixels(view_BChw), mean_B3hw, log_scale_B3hw)
        terms = {
            "likelihood": -log_density.mean(),
            "kl": kl_to_uniform(logits_BVyx).mean(),
            "imbalance": imbalance(logits_BVyx),
        }
        per_token = kl_weight * terms["kl"] + balance_weight * terms["imbalance"]
        loss = terms["likelihood"] + per_token / (3 * DOWNSAMPLING**2)
        metrics = {name: term.detach() for name, term in terms.items()}
        metrics["mae"] = (reconstruct(mean_B3hw.detach()) - view_BChw).abs().mean()
        return loss, metrics

    def _count(self, logits_BVyx: Tensor) -> None:
        token_M = logits_BVyx.argmax(dim=1).flatten()
        self.count_V.scatter_add_(0, token_M, torch.ones_like(token_M, dtype=self.count_V.dtype))

    def taken_counts(self) -> Tensor:
        """How often each word was the likeliest since the last call; they start again from zero."""
        taken_V = self.count_V.clone()
        self.count_V.zero_()
        return taken_V


@torch.no_grad()
def revive_words(
    trainee: DvaeTrainee,
    count_V: Tensor,
    *,
    average: Dvae,
    revive: float,
    generator: torch.Generator,
) -> int:
    """Words that nobody uses start again as neighbours of the most used ones. Ours.

    One whose share of the tokens, averaged over some hundred updates, is below `revive` times an
    equal share gets the weights of one of the most used, a little apart, in encoder and decoder;
    both lose a factor of two in probability, so that together they have what the source had.

    Args:
        count_V: the taken counts of all ranks.
        average: the running average of the weights, where the same words start again.
        revive: 0 leaves dead words dead.
        generator: on the CPU, the same on every rank.

    Returns:
        How many words started again.
    """
    dead_X, source_X = dead_and_sources(trainee.share_V, count_V, decay=SHARE_DECAY, revive=revive)
    if len(dead_X):
        seed = generator.get_state()
        for dvae in (trainee.dvae, average):
            _start_again(dvae, dead_X, source_X, generator=generator.set_state(seed))
    return len(dead_X)


def _start_again(
    dvae: Dvae, dead_X: Tensor, source_X: Tensor, *, generator: torch.Generator
) -> None:
    output, first = dvae.encoder.blocks.output.conv, dvae.decoder.blocks.input
    output.w[dead_X] = near(output.w[source_X].flatten(1), generator=generator)[..., None, None]
    output.b[source_X] -= math.log(2)
    output.b[dead_X] = output.b[source_X]
    column_XD = first.w[:, source_X, 0, 0].T
    first.w[:, dead_X, 0, 0] = near(column_XD, generator=generator).T


def relaxed_words(logits_BVyx: Tensor, *, temperature: float, generator: torch.Generator) -> Tensor:
    """A sample of the Gumbel-softmax relaxation: softmax((logits + Gumbel noise) / temperature)."""
    # Not empty_like: its memory format would follow the logits', and with it the order of draws.
    exponential_BVyx = torch.empty(logits_BVyx.shape, device=logits_BVyx.device)
    exponential_BVyx.exponential_(generator=generator)
    # -log of an exponential is a Gumbel; the clamp keeps a draw that rounds to 0 finite.
    gumbel_BVyx = -exponential_BVyx.clamp_min(torch.finfo(exponential_BVyx.dtype).tiny).log()
    return nn.functional.softmax((logits_BVyx + gumbel_BVyx) / temperature, dim=1)


def logit_laplace_log_density(pixel: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """log of f(x) = exp(-|logit x - mean| / b) / (2 b x (1 - x)), x in (0, 1), b = exp(log_scale).

    Elementwise. `pixel` must come from `map_pixels`. Source: the paper's appendix A.3.
    """
    distance = (torch.logit(pixel) - mean).abs() * torch.exp(-log_scale)
    return -(math.log(2) + log_scale + pixel.log() + torch.log1p(-pixel) + distance)


def kl_to_uniform(logits_BVyx: Tensor) -> Tensor:
    """KL(softmax(logits) || uniform) of each token, nats: 0 if undecided, ln V if certain; Byx."""
    log_word_BVyx = nn.functional.log_softmax(logits_BVyx, dim=1)
    negative_entropy_Byx = (log_word_BVyx.exp() * log_word_BVyx).sum(dim=1)
    return negative_entropy_Byx + math.log(logits_BVyx.shape[1])


def imbalance(logits_BVyx: Tensor) -> Tensor:
    """KL(mean of the batch's softmax(logits) || uniform), nats: 0 if all words share the tokens.

    The KL to the uniform prior is this plus the information that a token carries about its patch;
    weighing this part alone keeps every word in use without a price on information.
    """
    share_V = logits_BVyx.softmax(dim=1).mean(dim=(0, 2, 3)).clamp_min(1e-12)  # log(0) has no slope
    return math.log(len(share_V)) + (share_V * share_V.log()).sum()


@torch.no_grad()
def spread_words(dvae: Dvae, view_BChw: Tensor, *, deviation: float = 12.0) -> None:
    """Rescales the encoder's last layer: each word's logit gets mean 0 and this deviation.

    Mean and deviation are over the patches of `view_BChw`, some hundred views in [0, 1]. With
    fresh weights the logits differ more between words (0.27) than between patches (0.11), so one
    or two words win everywhere and stay winners; Gumbel noise has a deviation of 1.28. Ours, not
    in the paper.
    """
    logits_BVyx = dvae.logits(view_BChw)
    mean_V = logits_BVyx.mean(dim=(0, 2, 3))
    scale_V = deviation / logits_BVyx.std(dim=(0, 2, 3)).clamp_min(1e-6)  # blank views
    output = dvae.encoder.blocks.output.conv
    output.w.mul_(scale_V.view(-1, 1, 1, 1))
    output.b.sub_(mean_V).mul_(scale_V)


@torch.no_grad()
def update_average(average: Dvae, dvae: Dvae, *, decay: float, step: int) -> None:
    """average <- d * average + (1 - d) * dvae, with d = min(decay, (1 + step) / (10 + step)).

    The ramp forgets the initial weights in a short run (0.999 would remember 37 % of them after
    1,000 steps). Step counts from 0.
    """
    decay = min(decay, (1 + step) / (10 + step))
    for mean, new in zip(average.parameters(), dvae.parameters(), strict=True):
        mean.lerp_(new, 1 - decay)
