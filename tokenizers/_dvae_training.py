"""What a dVAE is trained on: Gumbel-softmax words, logit-Laplace pixels, KL to a uniform prior.

Source: Ramesh et al. 2021 ("Zero-Shot Text-to-Image Generation"), section 2.1, A.2, A.3.
Everything here is fp32: dall_e's convolutions refuse other inputs.
"""

import math

import torch
from torch import Tensor, nn

from mimkit.tokenizers._dvae_model import DOWNSAMPLING, Dvae, map_pixels, reconstruct


class DvaeTrainee(nn.Module):
    """A dVAE with its loss as `forward`, for any loop that wants a module that gives a scalar."""

    def __init__(self, dvae: Dvae) -> None:
        super().__init__()
        self.dvae = dvae

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
