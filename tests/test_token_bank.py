"""Banks of tokens: what is written is read, what is stale or damaged is refused by name."""

import json
import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pytest

from mimkit.errors import UserError
from mimkit.token_bank import BankWriter, TokenBank, make_binding

SAMPLES, GRID = 2500, (3, 4)  # three parts, the last one short
SETTINGS = {
    "data": "digest", "num_samples": SAMPLES, "tokenizer": "fingerprint", "vocabulary": 65536,
    "grid": GRID, "seed": 0, "views": {"jitter": 0.4, "crop_scale": (0.08, 1.0)},
    "versions": {"torch": "2.14"},
}  # fmt: skip
BINDING = make_binding(**SETTINGS)


def tokens(epoch: int) -> np.ndarray:
    return np.random.default_rng(epoch).integers(0, 65536, (SAMPLES, 12)).astype(np.uint16)


def fill(folder: Path, epochs: range, *, rank: int = 0, world: int = 1) -> None:
    writer = BankWriter(folder, binding=BINDING)
    for epoch in epochs:
        for part, samples in writer.missing(epoch, rank=rank, world=world):
            writer.write(epoch, part, tokens(epoch)[samples.start : samples.stop])
        writer.finish(epoch)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name != ".lock"}  # fmt: skip


@pytest.fixture
def bank(tmp_path: Path) -> Path:
    fill(tmp_path / "bank", range(2))
    return tmp_path / "bank"


def test_rows_are_those_that_were_written(bank: Path) -> None:
    opened = TokenBank(bank, expected=BINDING)
    assert opened.epochs == 2
    for reader in (opened, pickle.loads(pickle.dumps(opened))):  # as a loader process gets it
        for epoch, sample in ((0, 0), (1, 0), (0, SAMPLES - 1), (1, 1024), (0, 1023)):
            assert (reader.row(epoch, sample) == tokens(epoch)[sample]).all()
    with pytest.raises(UserError, match=r"2 epochs, but epoch 2 is asked for.*--epochs"):
        opened.row(2, 0)


def test_an_interrupted_bank_is_continued_where_it_was(bank: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    writer = BankWriter(other, binding=BINDING)
    parts = list(writer.missing(0))
    assert [(part, len(samples)) for part, samples in parts] == [(0, 1024), (1, 1024), (2, 452)]
    writer.write(0, 1, tokens(0)[1024:2048])
    assert not writer.finish(0)
    assert TokenBank(other, expected=BINDING).epochs == 0
    assert [part for part, _ in BankWriter(other, binding=BINDING).missing(0)] == [0, 2]
    fill(other, range(2))
    assert files(other) == files(bank)
    assert list(writer.missing(0)) == []


@pytest.mark.slow
def test_several_processes_fill_one_bank(bank: Path, tmp_path: Path) -> None:
    other, context = tmp_path / "other", multiprocessing.get_context("spawn")
    BankWriter(other, binding=BINDING)
    ranks = [context.Process(target=fill, args=(other, range(2)), kwargs={"rank": rank, "world": 2})
             for rank in range(2)]  # fmt: skip
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
    assert files(other) == files(bank)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "other"}, r"data: the bank has 'digest', this run 'other'"),
        ({"tokenizer": "other"}, r"tokenizer: the bank has 'fingerprint'"),
        ({"seed": 1}, r"seed: the bank has 0, this run 1"),
        ({"grid": (4, 3)}, r"grid: the bank has \[3, 4\], this run \[4, 3\]"),
        ({"views": {"jitter": 0.3, "crop_scale": (0.08, 1.0)}}, r"views: .*'jitter': 0\.4.*0\.3"),
        ({"versions": {"torch": "2.15"}}, r"versions: .*2\.14.*2\.15"),
    ],
)
def test_a_bank_of_something_else_is_refused_by_reader_and_writer(bank, change, message) -> None:
    expected = make_binding(**{**SETTINGS, **change})
    for opening in (lambda: TokenBank(bank, expected=expected),
                    lambda: BankWriter(bank, binding=expected)):  # fmt: skip
        with pytest.raises(UserError, match=message):
            opening()


def test_damage_is_found(bank: Path) -> None:
    path = bank / "epoch-00001.tokens"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    with pytest.raises(UserError, match=r"epoch-00001\.tokens has 59998 bytes.*have 60000"):
        TokenBank(bank, expected=BINDING)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match="is damaged: its SHA-256"):
        TokenBank(bank, expected=BINDING).row(1, 0)
    path.with_suffix(".json").unlink()
    with pytest.raises(UserError, match=r"epoch-00001\.json, the SHA-256"):
        TokenBank(bank, expected=BINDING).row(1, 0)


def test_no_bank_and_foreign_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no token bank.*make_tokens"):
        TokenBank(tmp_path, expected=BINDING)
    (tmp_path / "thesis.doc").write_text("mine")
    with pytest.raises(UserError, match="is not empty and is no token bank"):
        BankWriter(tmp_path, binding=BINDING)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.doc"]
    (tmp_path / "bank.json").write_text("{")
    with pytest.raises(UserError, match=r"bank\.json cannot be read"):
        TokenBank(tmp_path, expected=BINDING)


def test_a_vocabulary_beyond_16_bits_is_refused() -> None:
    with pytest.raises(UserError, match="65537 words"):
        make_binding(**{**SETTINGS, "vocabulary": 65537})


def test_the_header_holds_everything_that_decides_the_tokens(bank: Path) -> None:
    header = json.loads((bank / "bank.json").read_text())
    assert header == BINDING
    assert set(header) == {"format", *SETTINGS}


def test_making_more_of_a_damaged_bank_names_the_file(bank: Path) -> None:
    path = bank / "epoch-00001.tokens"
    whole = path.read_bytes()
    for damage, message in ((whole[:1000], "has 1000 bytes"), (whole[:-1] + b"?", "is damaged")):
        path.write_bytes(damage)
        with pytest.raises(UserError, match=rf"epoch-00001\.tokens {message}.*make_tokens"):
            fill(bank, range(2))


def test_a_bank_without_tokens_may_become_of_something_else(tmp_path: Path) -> None:
    BankWriter(tmp_path / "bank", binding=BINDING)
    other = make_binding(**{**SETTINGS, "seed": 1})
    writer = BankWriter(tmp_path / "bank", binding=other)
    assert TokenBank(tmp_path / "bank", expected=other).epochs == 0
    writer.write(0, 0, tokens(0)[:1024])
    with pytest.raises(UserError, match=r"seed: .*Choose another folder.*or delete that one"):
        BankWriter(tmp_path / "bank", binding=BINDING)
