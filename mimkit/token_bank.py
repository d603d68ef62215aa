"""Tokens computed once for each sample and epoch, and shared by every run that would see the same.

A bank is a folder: bank.json says what the tokens are of, epoch-00000.tokens holds one row of
uint16 a sample, row by row, and epoch-00000.json its SHA-256. Views are a pure function of (seed,
epoch, sample), so a row belongs to exactly the crop that training sees.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mimkit.batch import Grid
from mimkit.errors import UserError
from mimkit.files import disk_errors, locked, replacing, sha256, write_text

FORMAT = "mimkit.tokens.1"
MOST_WORDS = 2**16
_PART = 1024  # samples that are computed and written together

Tokens = NDArray[np.uint16]
Binding = dict[str, Any]  # what decides the tokens; JSON


def make_binding(
    *,
    data: str,
    num_samples: int,
    tokenizer: str,
    vocabulary: int,
    grid: Grid,
    seed: int,
    views: dict[str, Any],
    versions: dict[str, str],
) -> Binding:
    """Everything that decides the tokens of a bank, as it is compared and written.

    Args:
        data: digest of the training source. tokenizer: fingerprint. views: settings of the token
            view. versions: of the packages that decide pixels and tokens.

    Raises:
        UserError: the tokens do not fit into 16 bits.
    """
    if vocabulary > MOST_WORDS:
        raise UserError(
            f"the tokenizer has {vocabulary} words; a bank holds 16 bits a token, {MOST_WORDS} "
            "words. Train without engine.token_bank"
        )
    binding = {
        "format": FORMAT,
        "data": data,
        "num_samples": num_samples,
        "tokenizer": tokenizer,
        "vocabulary": vocabulary,
        "grid": list(grid),
        "seed": seed,
        "views": views,
        "versions": versions,
    }
    normal: Binding = json.loads(json.dumps(binding))  # tuples become lists, as in the file
    return normal


class TokenBank:
    """Tokens of a bank by epoch and sample; safe to send to worker processes.

    Attributes:
        epochs: epochs 0 to `epochs` - 1 are complete.

    Raises:
        UserError: there is no bank, it is of something else (the differing fields are named), or a
            file of it is missing, cut or changed.
    """

    def __init__(self, folder: Path, *, expected: Binding) -> None:
        self.folder = folder
        found = _read_binding(folder)
        remedy = "Make one for this run with tools/make_tokens.py"
        _check_binding(folder, found, expected, remedy)
        self._shape = (expected["num_samples"], expected["grid"][0] * expected["grid"][1])
        self.epochs = 0
        while _tokens_path(folder, self.epochs).exists():
            _check_size(_tokens_path(folder, self.epochs), self._shape)
            self.epochs += 1
        self._open: dict[int, Tokens] = {}
        if self.epochs:
            self._epoch(0)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": {}}

    def row(self, epoch: int, sample: int) -> Tokens:
        """tokens_N of one sample in one epoch."""
        tokens_N: Tokens = self._epoch(epoch)[sample]
        return tokens_N

    def _epoch(self, epoch: int) -> Tokens:
        """Mapped when first asked for, its SHA-256 checked then; the last two are kept open."""
        if epoch not in self._open:
            if not 0 <= epoch < self.epochs:
                raise UserError(
                    f"{self.folder} holds tokens of {self.epochs} epochs, but epoch {epoch} is "
                    "asked for (counted from 0); make more with tools/make_tokens.py --epochs"
                )
            path = _tokens_path(self.folder, epoch)
            _check_hash(path)
            # a plain array: rows of np.memmap are memmaps again, which takes three times as long
            mapped: Tokens = np.asarray(np.memmap(path, np.dtype("<u2"), "r", shape=self._shape))
            self._open = {e: t for e, t in self._open.items() if e == epoch - 1} | {epoch: mapped}
        return self._open[epoch]


class BankWriter:
    """Fills a bank part by part; several processes may, and an interrupted one is continued.

    Attributes:
        num_tokens: N, of a sample.

    Raises:
        UserError: the folder holds something else, or another bank (the differing fields are
            named).
    """

    def __init__(self, folder: Path, *, binding: Binding) -> None:
        self.folder, self._binding = folder, binding
        self._num_samples = int(binding["num_samples"])
        self.num_tokens = int(binding["grid"][0] * binding["grid"][1])
        if (folder / "bank.json").exists() and not self._is_empty():
            remedy = "Choose another folder for this one, or delete that one"
            _check_binding(folder, _read_binding(folder), binding, remedy)
        elif folder.exists() and not (folder / "bank.json").exists() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty and is no token bank; choose another folder")
        else:
            write_text(folder / "bank.json", json.dumps(binding, indent=1))

    def _is_empty(self) -> bool:
        """Whether nothing was computed yet, so that it may as well be of something else."""
        _read_binding(self.folder)
        parts = self.folder.glob("epoch-*.parts/*")
        return not any(parts) and not any(self.folder.glob("epoch-*.tokens"))

    def parts(self) -> int:
        """Parts of an epoch."""
        return -(-self._num_samples // _PART)

    def missing(self, epoch: int, *, rank: int = 0, world: int = 1) -> Iterator[tuple[int, range]]:
        """(part, its samples) of what this rank of several still has to compute.

        Raises:
            UserError: the epoch is there and damaged; one rank looks at each.
        """
        if (whole := _tokens_path(self.folder, epoch)).exists():
            if epoch % world == rank:
                _check_size(whole, (self._num_samples, self.num_tokens))
                _check_hash(whole)
            return
        for part in range(rank, self.parts(), world):
            samples = range(part * _PART, min((part + 1) * _PART, self._num_samples))
            if not self._part_path(epoch, part).exists():
                yield part, samples

    def write(self, epoch: int, part: int, tokens_BN: Tokens) -> None:
        """Keeps one part; whole or not at all."""
        rows = min(_PART, self._num_samples - part * _PART)
        assert tokens_BN.shape == (rows, self.num_tokens) and tokens_BN.dtype == np.uint16
        path = self._part_path(epoch, part)
        with disk_errors(path):
            path.parent.mkdir(exist_ok=True)
            with replacing(path) as temporary:
                temporary.write_bytes(tokens_BN.astype("<u2").tobytes())

    def finish(self, epoch: int) -> bool:
        """Joins the parts of an epoch if all are there; whoever comes last does it.

        The parts stay until the joined file is in place, so that a crash loses nothing.
        """
        with locked(self.folder / ".lock"):
            return self._join(epoch)

    def _join(self, epoch: int) -> bool:
        whole = _tokens_path(self.folder, epoch)
        parts = [self._part_path(epoch, part) for part in range(self.parts())]
        if not whole.exists():
            if not all(path.exists() for path in parts):
                return False
            with disk_errors(whole), replacing(whole) as temporary:
                with temporary.open("wb") as file:
                    for path in parts:
                        file.write(path.read_bytes())
                _check_size(temporary, (self._num_samples, self.num_tokens))
                digest = {"sha256": sha256(temporary), "bytes": temporary.stat().st_size}
                write_text(_hash_path(whole), json.dumps(digest))
        for path in parts:
            path.unlink(missing_ok=True)
        if parts[0].parent.exists() and not any(parts[0].parent.iterdir()):
            parts[0].parent.rmdir()
        return True

    def _part_path(self, epoch: int, part: int) -> Path:
        return self.folder / f"epoch-{epoch:05d}.parts" / f"{part:06d}.tokens"


def _tokens_path(folder: Path, epoch: int) -> Path:
    return folder / f"epoch-{epoch:05d}.tokens"


def _hash_path(tokens: Path) -> Path:
    return tokens.with_suffix(".json")


def _read_binding(folder: Path) -> Binding:
    try:
        found: Binding = json.loads((folder / "bank.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} is no token bank: it has no bank.json. Make one with tools/make_tokens.py"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / 'bank.json'} cannot be read: {error}") from error
    return found


def _check_binding(folder: Path, found: Binding, expected: Binding, remedy: str) -> None:
    differ = [
        f"{key}: the bank has {old!r}, this run {new!r}"
        for key in dict.fromkeys([*expected, *found])
        for old, new in _leaves(found.get(key), expected.get(key))
    ]
    if differ:
        raise UserError(
            f"the token bank {folder} is of something else; {'; '.join(differ)}. {remedy}, or give "
            "the settings it was made with"
        )


def _leaves(old: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    """Pairs that differ, one level down in mappings."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            if old.get(key) != new.get(key):
                yield {key: old.get(key)}, {key: new.get(key)}
    elif old != new:
        yield old, new


def _check_size(path: Path, shape: tuple[int, int]) -> None:
    expected = 2 * shape[0] * shape[1]
    if (size := path.stat().st_size) != expected:
        raise UserError(
            f"{path} has {size} bytes; {shape[0]} samples of {shape[1]} tokens have {expected}. "
            "Delete it and run tools/make_tokens.py again"
        )


def _check_hash(path: Path) -> None:
    said = _hash_path(path)
    try:
        expected = json.loads(said.read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{said}, the SHA-256 of {path.name}, cannot be read; delete both and run "
            "tools/make_tokens.py again"
        ) from error
    if sha256(path) != expected:
        raise UserError(
            f"{path} is damaged: its SHA-256 is not the one in {said.name}. Delete both and run "
            "tools/make_tokens.py again"
        )
