"""One half of DALL-E's dVAE: whether named tensors are one, of which size, and its network."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from mimkit.errors import UserError
from mimkit.tokenizers._dvae_model import Dvae

HOW_TO_GET_IT = "`mimkit convert_dalle --download encoder OUT.safetensors` fetches OpenAI's"

Part = Literal["encoder", "decoder"]
_FIRST, _LAST = "blocks.input.w", "blocks.output.conv.w"
_BLOCK = re.compile(r"blocks\.group_1\.block_\d+\.res_path\.conv_1\.w")


@dataclass(frozen=True)
class DalleWeights:
    """fp32 on the CPU; they fill the encoder or the decoder of a `Dvae` of this size."""

    part: Part
    width: int
    blocks: int
    vocabulary: int
    weights: dict[str, Tensor]
    sha256: str  # of names, shapes and numbers: the same from every kind of file

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.weights.values())

    def network(self) -> Any:
        """dall_e's own module with these weights; the other half takes no memory."""
        network = _empty(self.part, self.width, self.blocks, self.vocabulary)
        network.load_state_dict(self.weights, assign=True)
        return network


def checked_weights(path: Path, found: Mapping[str, Tensor]) -> DalleWeights:
    """The tensors of the file `path` as the half of a dVAE that they are.

    Raises:
        UserError: they are neither half; lists what is missing, not used, misshapen, not finite.
    """
    weights = _without_prefix(path, found)
    part, width, blocks, vocabulary = _architecture(path, weights)
    shapes = {
        name: weight.shape
        for name, weight in _empty(part, width, blocks, vocabulary).state_dict().items()
    }
    problems = {
        "missing": [name for name in shapes if name not in weights],
        "not used": [name for name in weights if name not in shapes],
        "of another shape": [
            name for name in shapes if name in weights and weights[name].shape != shapes[name]
        ],
        "not finite": [name for name in weights if not weights[name].isfinite().all()],
    }
    listed = [f"{_some(names)} {what}" for what, names in problems.items() if names]
    if listed:
        raise UserError(
            f"the weights in '{path}' are not those of DALL-E's {part} (width {width}, blocks "
            f"{blocks}, vocabulary {vocabulary}): {'; '.join(listed)}. {HOW_TO_GET_IT}."
        )
    fp32 = {name: weights[name].float().contiguous() for name in shapes}
    return DalleWeights(part, width, blocks, vocabulary, fp32, _digest(fp32))


def _empty(part: Part, width: int, blocks: int, vocabulary: int) -> Any:
    dvae = Dvae(width=width, blocks=blocks, vocabulary=vocabulary, device="meta")
    return dvae.encoder if part == "encoder" else dvae.decoder


def _without_prefix(path: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Frameworks put the name of what is around a network before it: `target_generator.blocks`."""
    prefixes = [name.removesuffix(_FIRST) for name in weights if name.endswith(_FIRST)]
    if len(prefixes) != 1:
        raise UserError(
            f"the file '{path}' holds {len(prefixes)} networks of DALL-E's kind, not one: "
            f"{_some(list(weights))}. What tools/train_tokenizer.py makes is for tokenizer=dvae; "
            f"{HOW_TO_GET_IT}."
        )
    return {name.removeprefix(prefixes[0]): weight for name, weight in weights.items()}


def _architecture(path: Path, weights: Mapping[str, Tensor]) -> tuple[Part, int, int, int]:
    """Which half, and its width, blocks and vocabulary, by its first and its last convolution."""
    first, last = (
        tuple(weights[name].shape) if name in weights else () for name in (_FIRST, _LAST)
    )
    blocks = sum(_BLOCK.fullmatch(name) is not None for name in weights)
    if len(first) == len(last) == 4:
        part: Part = "encoder" if first[2:] == (7, 7) else "decoder"
        width, vocabulary = (first[0], last[0]) if part == "encoder" else (last[1], first[1])
        if 4 <= width <= 4096 and width % 4 == 0 and 1 <= blocks <= 64 and 2 <= vocabulary <= 2**20:
            return part, width, blocks, vocabulary
    raise UserError(
        f"the weights in '{path}' are neither DALL-E's encoder nor its decoder: {_FIRST} has shape "
        f"{first}, {_LAST} {last}, and group_1 {blocks} blocks; the encoder has (256, 3, 7, 7), "
        f"(8192, 2048, 1, 1) and 2. {HOW_TO_GET_IT}."
    )


def _digest(weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        digest.update(weight.numpy().tobytes())
    return digest.hexdigest()


def _some(names: list[str], *, limit: int = 4) -> str:
    shown = ", ".join(names[:limit]) or "no tensor"
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
