"""From the records of a pickle to the tensors it promises: names, shapes, and where the bytes are.

Known are whole modules of dall_e and state dicts. Nothing is built of the modules: their tensors
are all that is wanted, so attributes that come and go between torch versions (Upsample's
`recompute_scale_factor`) do not matter.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from mimkit.tokenizers._dalle_pickle import ORDERED_DICT, Made, Name, RefusedError

_MODULES = frozenset(
    (
        "dall_e.decoder Decoder",
        "dall_e.decoder DecoderBlock",
        "dall_e.encoder Encoder",
        "dall_e.encoder EncoderBlock",
        "dall_e.utils Conv2d",
        "torch.nn.modules.activation ReLU",
        "torch.nn.modules.container Sequential",
        "torch.nn.modules.linear Identity",
        "torch.nn.modules.pooling MaxPool2d",
        "torch.nn.modules.upsampling Upsample",
    )
)
_STORAGES = {
    "torch BFloat16Storage": torch.bfloat16,
    "torch DoubleStorage": torch.float64,
    "torch FloatStorage": torch.float32,
    "torch HalfStorage": torch.float16,
}
_PARAMETER, _TENSOR = "torch._utils _rebuild_parameter", "torch._utils _rebuild_tensor_v2"
_SETS = ("builtins set", "__builtin__ set")
KNOWN = frozenset(
    (*_MODULES, *_STORAGES, _PARAMETER, _TENSOR, ORDERED_DICT, *_SETS, "torch device")
)
_DEPTH = 16  # modules in modules; dall_e has 5
_LONGEST_NAME = 200  # characters
_DIMENSIONS = 4  # of a tensor: a convolution's weight


@dataclass(frozen=True)
class Storage:
    """`numel` numbers that lie elsewhere in the file, under `key`."""

    key: str
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Claim:
    """A tensor that the pickle says is in the file: within its storage, and not larger than it."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.storage.dtype.itemsize


def refer(persistent_id: object) -> Name | Storage:
    """What torch.save keeps out of the pickle: storages, and in the older layout classes."""
    match persistent_id:
        case ("module", Name() as name, _, _):
            return name
        case ("storage", Name(kind), str(key), str(), int(numel), *rest) if (
            kind in _STORAGES and _is_key(key) and _are_sizes((numel,)) and rest in ([], [None])
        ):
            if numel > 0:
                return Storage(key, _STORAGES[kind], numel)
    raise RefusedError(f"its pickle refers to {_id(persistent_id)}, which torch.save never does")


def claims(root: object) -> dict[str, Claim]:
    """The tensors of a module or of a state dict, by name; `RefusedError` if it is neither."""
    if isinstance(root, Made) and root.name in _MODULES:
        return dict(_module_claims(root, "", set()))
    entries = _entries(root, "what it holds")
    entries = _entries(entries.get("state_dict", entries), "state_dict")
    return {name: _claim(name, value) for name, value in entries.items()}


def _module_claims(module: object, prefix: str, seen: set[int]) -> Iterator[tuple[str, Claim]]:
    if not isinstance(module, Made) or not isinstance(module.state, dict):
        raise RefusedError(f"{prefix or 'what it holds'} is no module")
    if id(module) in seen or len(seen) > 10_000 or prefix.count(".") > _DEPTH:
        raise RefusedError("its modules contain each other, or are endlessly many")
    seen.add(id(module))
    for kind in ("_parameters", "_buffers"):
        for name, value in _entries(module.state.get(kind), prefix + kind).items():
            if value is not None:
                yield prefix + name, _claim(prefix + name, value)
    for name, child in _entries(module.state.get("_modules"), f"{prefix}_modules").items():
        yield from _module_claims(child, f"{prefix}{name}.", seen)


def _entries(value: object, what: str) -> Mapping[str, object]:
    if isinstance(value, Made) and value.name == ORDERED_DICT and not value.arguments:
        value = value.entries
    if not isinstance(value, dict) or not all(
        isinstance(key, str) and key.isprintable() and len(key) < _LONGEST_NAME for key in value
    ):
        raise RefusedError(f"{what} is no dictionary with names as keys")
    return value


def _claim(name: str, value: object) -> Claim:
    if isinstance(value, Made) and value.name == _PARAMETER and value.arguments:
        value = value.arguments[0]
    arguments = value.arguments if isinstance(value, Made) and value.name == _TENSOR else ()
    match arguments:
        case (Storage() as storage, int(offset), tuple(shape), tuple(stride), *_) if (
            _are_sizes((offset, *shape, *stride)) and len(shape) == len(stride) <= _DIMENSIONS
        ):
            claim = Claim(storage, offset, shape, stride)
        case _:
            raise RefusedError(f"'{name}' is no tensor of floating-point numbers")
    if not _lies_within(claim):
        raise RefusedError(
            f"'{name}' of shape {shape}, stride {stride} and offset {offset} does not lie within "
            f"its storage of {storage.numel} numbers"
        )
    return claim


def _is_key(key: str) -> bool:
    """torch.save numbers the storages."""
    return key.isdecimal() and len(key) < _LONGEST_NAME


def _are_sizes(numbers: Sequence[object]) -> bool:
    return all(type(number) is int and abs(number) < 2**63 for number in numbers)


def _lies_within(claim: Claim) -> bool:
    shape, stride, numel = claim.shape, claim.stride, claim.storage.numel
    if min((claim.offset, *stride)) < 0 or min(shape, default=1) < 1:
        return False
    last = claim.offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    return last < numel and math.prod(shape) <= numel


def _id(persistent_id: object) -> str:
    """The first words of a persistent id; it may be nested without end, so not its repr."""
    parts = persistent_id if isinstance(persistent_id, tuple) else (persistent_id,)
    return repr([p if isinstance(p, str | int) else type(p).__name__ for p in parts])[:80]
