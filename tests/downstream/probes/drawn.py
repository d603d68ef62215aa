"""Features in which only one layer and one pooling tell the classes apart."""

import numpy as np
import torch

from mimkit.downstream.features import Features

LAYERS, NUM_CLASSES = (2, 4, 6), 4


def draw_features(num: int, *, seed: int, told_by: int = 1, tokens: int = 5) -> Features:
    """Width 12. Class tokens of layer LAYERS[told_by] and one patch token tell the class."""
    draw = torch.Generator().manual_seed(seed)
    label_B = torch.arange(num) % NUM_CLASSES
    centre_BD = 2.0 * torch.eye(NUM_CLASSES, 12)[label_B]
    pooled = torch.randn(num, 3, 2, 12, generator=draw)
    pooled[:, told_by, 1] += centre_BD
    token = torch.randn(num, 2, tokens, 12, generator=draw)
    where = torch.randint(tokens, (num,), generator=draw)
    token[torch.arange(num), 1, where] += 3 * centre_BD
    return Features(pooled.numpy(), LAYERS, label_B, torch.arange(num),
                    token.numpy().astype(np.float16), (4, 6))  # fmt: skip
