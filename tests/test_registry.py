"""Parts are found by their file's name; a misspelling gets the nearest name there is."""

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from mimkit.build import make_part
from mimkit.config import PartConfig
from mimkit.data.sources import SOURCES
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
