"""Networks out of files: read without executing anything, filled without leaving anything over."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mimkit.errors import UserError
from mimkit.tokenizers._dalle_layouts import PICKLE, ZIP, read_torch_file
from mimkit.tokenizers._dalle_pickle import RefusedError

TRAINED = "tokenizer.safetensors"  # in the run folder of a tokenizer's training


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """timm draws initial weights from the global generator: from this seed, and it is put back."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def trained_file(path: str) -> Path:
    """`path`, or the file in it where it is the run folder of a tokenizer's training.

    Raises:
        UserError: it is another folder, or that training has not ended.
    """
    given = Path(path).expanduser()
    if not given.is_dir():
        return given
    if (given / TRAINED).is_file():
        return given / TRAINED
    raise UserError(
        f"tokenizer.path={path} is a folder without {TRAINED}, which tools/train_tokenizer.py "
        "writes into its run folder when it ends; name that file, or the run folder of a training "
        "that has ended"
    )


def read_weights(path: Path, *, what: str, remedy: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors, by the file's first bytes, not by its suffix.

    Args:
        what: should be in the file, and
        remedy: how one is made, for messages.

    Raises:
        UserError: the file is missing, cut short, text, or a pickle of more than tensors.
    """
    if not path.is_file():
        raise UserError(f"there is no file '{path}' with {what}. {remedy}.")
    with path.open("rb") as opened:
        head = opened.read(512)
    try:
        if head.startswith((ZIP, PICKLE)) and head[4:9] != b"\0\0\0\0{":
            return {}, read_torch_file(path)
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return file.metadata() or {}, weights
    except (SafetensorError, RefusedError, OSError) as error:
        raise UserError(
            f"the file '{path}' is not {what}, and nothing in it was executed: {error}. Expected "
            f"is safetensors, or torch.save of a dictionary of floating-point tensors. {remedy}."
        ) from error


def fill(network: nn.Module, weights: Mapping[str, Tensor], *, path: str, remedy: str) -> None:
    """Every weight of the network, and none that is left over.

    Raises:
        UserError: lists what is left over on either side, of another shape, or not finite.
    """
    expected = network.state_dict()
    problems = {
        "not used": [name for name in weights if name not in expected],
        "missing": [name for name in expected if name not in weights],
        "of another shape": [
            name
            for name, weight in weights.items()
            if name in expected and weight.shape != expected[name].shape
        ],
        "not finite": [name for name, weight in weights.items() if not weight.isfinite().all()],
    }
    found = [f"{what}: {_some(names)}" for what, names in problems.items() if names]
    if found:
        raise UserError(
            f"the weights in {path} do not fit a {type(network).__name__} of this size "
            f"({'; '.join(found)}). {remedy}."
        )
    network.load_state_dict(dict(weights))


def _some(names: list[str], *, limit: int = 4) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
