"""Parts are found by their file's name; a misspelling gets the nearest name there is."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from commands import ROOT, command, pretrain

from mimkit.build import make_part
from mimkit.cli._audit import parse_part
from mimkit.config import PartConfig
from mimkit.data.sources import SOURCES
from mimkit.encoder_export import export_run
from mimkit.errors import UserError
from mimkit.export import EXPORTERS
from mimkit.masks import MASKS
from mimkit.models.stems import STEMS
from mimkit.registry import Registry, nearest
from mimkit.tokenizers import TOKENIZERS
from mimkit.train.runtimes import RUNTIMES

REGISTRIES = [MASKS, STEMS, TOKENIZERS, SOURCES, RUNTIMES, EXPORTERS]
PARTS = [(registry, name) for registry in REGISTRIES for name in registry.names()]


@pytest.mark.parametrize(("registry", "name"), PARTS, ids=[f"{r.kind}-{n}" for r, n in PARTS])
def test_every_file_registers_a_part_under_its_name(registry: Registry[Any], name: str) -> None:
    part = registry[name]
    assert part.__module__ == f"{registry.package}.{name}"
    assert name in registry
    assert registry[name] is part


@pytest.mark.parametrize("registry", REGISTRIES, ids=[r.kind for r in REGISTRIES])
def test_a_misspelt_part_is_answered_with_the_nearest(registry: Registry[Any]) -> None:
    name = registry.names()[0]
    with pytest.raises(UserError) as caught:
        registry[name + "x"]
    message = str(caught.value)
    assert f"there is no {registry.kind} called '{name}x'. Did you mean '{name}'?" in message
    assert all(known in message for known in registry.names())


@pytest.mark.parametrize("name", ["_blocks", "__init__", "", "os", "../data"])
def test_private_files_and_paths_are_no_parts(name: str) -> None:
    assert name not in MASKS
    with pytest.raises(UserError, match="there is no mask called"):
        MASKS[name]


def test_a_hint_is_given_for_what_is_near_and_for_nothing_else() -> None:
    assert nearest("hmpl", ["linear", "hmlp"]) == " Did you mean 'hmlp'?"
    assert nearest("zzz", ["linear", "hmlp"]) == ""


def test_names_are_told_without_importing_the_parts() -> None:
    code = (
        "import sys; from mimkit.masks import MASKS; names = MASKS.names(); "
        "print(len(names), [n for n in names if f'mimkit.masks.{n}' in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == f"{len(MASKS.names())} []\n"


def test_a_new_file_is_a_new_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "own_parts"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from mimkit.registry import Registry\nPARTS = Registry('part', __name__)\n"
    )
    body = "from own_parts import PARTS\n@PARTS.register\nclass Whatever:\n    pass\n"
    (folder / "first.py").write_text(body)
    (folder / "twice.py").write_text(body + "@PARTS.register\nclass Another:\n    pass\n")
    (folder / "none.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    from own_parts import PARTS  # type: ignore[import-not-found]

    assert PARTS.names() == ["first", "none", "twice"]
    assert PARTS["first"].__name__ == "Whatever"
    with pytest.raises(ValueError, match=r"own_parts\.twice registers two parts"):
        PARTS["twice"]
    with pytest.raises(ValueError, match=r"own_parts\.none registers no part"):
        PARTS["none"]


class _Parts(dict[str, Any]):
    kind = "stem"
    plug_in = dict.__getitem__


def _stem(*, width: int, norm: Literal["bn", "ln"] = "bn", scale: float = 1.0) -> tuple[Any, ...]:
    return width, norm, scale


PARTS_HERE: Any = _Parts(plain=_stem)


def test_settings_of_a_part_are_typed_and_given_ones_are_kept() -> None:
    config = PartConfig(name="plain", scale="1e-3", norm="ln")
    assert make_part(PARTS_HERE, config, width=8, unknown=1) == (8, "ln", 1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nrom": "ln"}, "takes no setting 'nrom'. Did you mean 'norm'? It takes: norm, scale"),
        ({"width": 8}, "takes no setting 'width'"),  # the program gives it
        ({"norm": "gn"}, "stem.norm: Input should be 'bn' or 'ln' (given: 'gn')"),
        ({"scale": "much"}, "stem.scale: Input should be a valid number"),
    ],
)
def test_a_wrong_setting_of_a_part_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        make_part(PARTS_HERE, PartConfig(name="plain", **settings), width=8)
    assert message in str(caught.value)


def test_a_setting_that_a_part_needs_is_named() -> None:
    with pytest.raises(UserError, match=r"stem 'plain' needs stem\.width"):
        make_part(PARTS_HERE, PartConfig(name="plain"))


MINE = """
from mimkit.masks import MASKS, Mask

@MASKS.register
class Corner(Mask):
    def __init__(self, *, grid, num_masked: int):
        self.grid, self.num_masked = grid, num_masked

    def __call__(self, rng): ...

def make_corner(*, grid, num_masked: int) -> Mask:
    return Corner(grid=grid, num_masked=num_masked)

def silent(*, grid, num_masked: int):
    return Corner(grid=grid, num_masked=num_masked)

SIZE = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's file, in the folder in which the command is given; also importable as a module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "users_own_mask.py"
    path.write_text(MINE)
    return path


@pytest.mark.parametrize(
    "where", ["users_own_mask.py", "users_own_mask", "{folder}/users_own_mask.py"]
)
@pytest.mark.parametrize("what", ["Corner", "make_corner"])
def test_a_part_of_the_users_own_is_named_by_its_file_or_module(
    mine: Path, where: str, what: str
) -> None:
    """A class or a function that makes the part; the settings are those it takes."""
    config = PartConfig(name=f"{where.format(folder=mine.parent)}:{what}", num_masked="4")
    mask: Any = make_part(MASKS, config, grid=(4, 4))
    assert type(mask).__name__ == "Corner"
    assert (mask.grid, mask.num_masked) == ((4, 4), 4)
    with pytest.raises(UserError, match=r"takes no setting 'num_mask'\. Did you mean 'num_masked'"):
        make_part(MASKS, PartConfig(name=config.name, num_mask=4), grid=(4, 4))


def test_a_users_file_takes_no_name_of_ours_and_hides_no_module(tmp_path: Path) -> None:
    """Not even where it has the file name of a part, or of a module of Python's."""
    for name in ("random", "blockwise"):
        path = tmp_path / f"{name}.py"
        path.write_text(MINE)
        part = MASKS.plug_in(f"{path}:Corner")
        assert part is MASKS.plug_in(f"{path}:Corner")
        assert MASKS.name_of(part) == f"{path}:Corner"
        assert MASKS[name].__module__ == f"mimkit.masks.{name}"
        assert MASKS.name_of(MASKS[name]) == name
    assert not hasattr(sys.modules.get("random"), "Corner")


def test_a_name_out_of_a_file_starts_no_code(tmp_path: Path) -> None:
    path = tmp_path / "trap.py"
    path.write_text(f"from pathlib import Path\nPath({str(tmp_path / 'executed')!r}).touch()\n")
    with pytest.raises(UserError, match=r"is no part of mimkit but code of a user's own.*plug_in"):
        STEMS[f"{path}:Anything"]
    assert not (tmp_path / "executed").exists()
    with pytest.raises(UserError, match="there is no class or function 'Anything'"):
        STEMS.plug_in(f"{path}:Anything")
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_file.py:Mine", "there is no file '{folder}/no_such_file.py'; a relative path"),
        ("no_such_module:Mine", "Python finds no module 'no_such_module'; install it"),
        ("no.such.module:Mine", "Python finds no module 'no.such.module'; install it"),
        (":Mine", "names no module before the colon"),
        ("users_own_mask.py:Cornr", "Did you mean 'Corner'? It has: Corner, make_corner, silent"),
        ("users_own_mask.py:", "there is no class or function '' in 'users_own_mask.py'"),
        ("users_own_mask.py:SIZE", "there is no class or function 'SIZE' in 'users_own_mask.py'"),
        ("os:system", "mask 'os:system' is no mask: expected a class that derives from"),
        ("mimkit.models.stems.hmlp:Hmlp", "is no mask: expected a class that derives from"),
        ("users_own_mask.py:silent", "or a function with such a class as its return annotation"),
    ],
)
def test_a_users_part_that_is_not_there_is_explained(mine: Path, name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        MASKS.plug_in(name)
    assert message.format(folder=mine.parent) in str(caught.value)


def test_an_error_in_the_users_file_is_the_users_and_the_file_is_read_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("import no_such_module_of_theirs\n")
    with pytest.raises(UserError, match=r"line 1: .*no_such_module_of_theirs") as found:
        MASKS.plug_in(f"{path}:Corner")
    assert isinstance(found.value.__cause__, ModuleNotFoundError)
    path.write_text(MINE)
    assert MASKS.plug_in(f"{path}:Corner").__name__ == "Corner"


def _digest(name: str) -> str | None:
    """As another process finds it."""
    for module in [one for one in sys.modules if one.startswith(("mimkit_plugged_", "my_own_"))]:
        del sys.modules[module]
    return Registry("mask", "mimkit.masks").code_digest(name)


def test_a_users_code_has_a_digest_of_its_file_and_of_those_beside_it_that_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    files = {name: tmp_path / f"{name}.py" for name in ("mine", "my_own_sizes", "my_own_other")}
    for file in files.values():
        file.write_text("SIZE = 3\n")
    files["mine"].write_text("import my_own_sizes\n" + MINE)
    name = f"{files['mine']}:Corner"
    first = _digest(name)
    assert first is not None and len(first) == 12
    files["my_own_other"].write_text("SIZE = 4\n")
    assert _digest(name) == first == _digest(f"{files['mine']}:make_corner")
    files["my_own_sizes"].write_text("SIZE = 4\n")
    other = _digest(name)
    files["mine"].write_text("import my_own_sizes\n" + MINE.replace("SIZE = 3", "SIZE = 5"))
    assert len({first, other, _digest(name)}) == 3
    assert MASKS.code_digest("blockwise") is None, "ours go with mimkit's version"
    assert STEMS.code_digest("mimkit.ablation.damaged_stem:Damaged") is None


def test_a_users_file_that_is_edited_at_once_is_what_runs(tmp_path: Path) -> None:
    """Python would take a compilation of the same second and length for it."""
    path = tmp_path / "quick.py"
    for size in (3, 4):
        path.write_text(MINE.replace("SIZE = 3", f"SIZE = {size}"))
        os.utime(path, (1, 1))
        _digest(f"{path}:Corner")
        [module] = [one for name, one in sys.modules.items() if name.endswith(".quick")]
        assert size == module.SIZE


def test_a_run_of_a_stem_that_was_edited_is_not_continued_and_not_taken_for_finished(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run = tmp_path / "doubled.py", tmp_path / "run"
    words = [*tiny, f"stem={path}:Doubled", "train.steps=2", f"output.dir={run}"]

    def train(factor: int) -> int:
        path.write_text(STEM.replace("* 2", f"* {factor}"))
        STEMS._parts.pop(f"{path}:Doubled", None)
        for module in [one for one in sys.modules if one.endswith(".doubled")]:
            del sys.modules[module]
        return pretrain(words)

    def digest() -> str | None:
        return STEMS.code_digest(f"{path}:Doubled")

    assert train(2) == 0
    first = digest()
    assert json.loads((run / "run.json").read_text())["facts"][f"code of {path}:Doubled"] == first
    for ending in ("finished", "unfinished"):
        capsys.readouterr()
        assert train(3) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"code of {path}:Doubled: '{first}' -> '{digest()}'" in said, ending
        assert "Restore it, or start another run" in said
        (run / "summary.json").unlink(missing_ok=True)
    assert train(2) == 0


def test_audits_take_a_users_part_with_settings() -> None:
    assert parse_part("my/mine.py:Corner") == PartConfig(name="my/mine.py:Corner")
    with_settings = PartConfig(name="mine.py:Corner", size=3, far="no")
    assert parse_part("mine.py:Corner:size=3,far='no'") == with_settings


STEM = """
from mimkit.models.stems import STEMS

Linear = STEMS["linear"]

class Doubled(Linear):
    def forward(self, image_BCHW, mask_BN=None):
        return super().forward(image_BCHW, mask_BN) * 2
"""
LOAD = """
import sys
from mimkit.errors import UserError
from mimkit.export.timm import load
from mimkit.models.stems import STEMS

try:
    load("encoder.safetensors")
except UserError as error:
    print(error)
STEMS.plug_in("doubled.py:Doubled")
print(type(load("encoder.safetensors").patch_embed.stem).__name__)
"""


@pytest.mark.slow
def test_a_users_stem_is_trained_exported_and_rebuilt(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the name that the user gave it; elsewhere the file alone does not start its code."""
    monkeypatch.chdir(tmp_path)
    Path("doubled.py").write_text(STEM)
    words = [*tiny, "stem=doubled.py:Doubled", "train.steps=2", "output.dir=run"]
    assert pretrain([*words, "engine.workers=1"]) == 0
    report = export_run(Path("run"), format_name="timm", out=Path("encoder.safetensors")).report
    assert report.max_difference <= report.tolerance
    Path("elsewhere.py").write_text(LOAD)
    ended = command(["elsewhere.py"], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert ended.code == 0, ended.err
    refusal, stem = ended.out.splitlines()
    assert "the stem 'doubled.py:Doubled' is no part of mimkit but code of a user's own" in refusal
    assert stem == "Doubled"


def test_the_documented_tokenizer_is_complete(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "parts.md").read_text(encoding="utf-8")
    path = tmp_path / "mine.py"
    path.write_text("#" + page.partition("```python\n# mine.py ")[2].partition("```")[0])
    tokenizer = make_part(TOKENIZERS, PartConfig(name=f"{path}:Grey", levels="32"))
    view_BChw = torch.linspace(0, 1, 2 * 3 * 16 * 24).view(2, 3, 16, 24)
    target_BN = tokenizer.encode(view_BChw)
    assert target_BN.shape == (2, 6) and tokenizer.grid(16, 24) == (2, 3)
    assert int(target_BN.min()) >= 0 and int(target_BN.max()) < tokenizer.vocabulary == 32
    loss = tokenizer.loss(torch.zeros(12, 32), target_BN.flatten())
    assert float(loss) == pytest.approx(torch.tensor(32.0).log().item())
