"""The hash of everything that decides a tokenizer's targets."""

import hashlib

from torch import nn


def fingerprint(settings: str, weights: nn.Module) -> str:
    """sha256 over settings as text, then over names and numbers of the weights."""
    digest = hashlib.sha256(settings.encode())
    for name, weight in sorted(weights.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
