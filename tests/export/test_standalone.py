"""One file out of ours: what it takes, what it leaves out, and what it refuses."""

import sys
import types
from pathlib import Path

import pytest

from mimkit.export._standalone import standalone
from mimkit.models.encoder import ImageEncoder
from mimkit.models.stems import STEMS
from mimkit.models.stems.hmlp import FACTORS, Hmlp


def module_of(text: str, tmp_path: Path) -> types.ModuleType:
    module = types.ModuleType("made")
    path = tmp_path / "made.py"
    path.write_text(text)
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("name", STEMS.names())
def test_any_stem_stands_alone(name: str, tmp_path) -> None:
    stem = STEMS[name](width=32)
    text = standalone(type(stem), header="A stem.")
    assert "mimkit" not in {line.split()[1].split(".")[0] for line in text.splitlines()
                            if line.startswith(("from ", "import "))}  # fmt: skip
    again = getattr(module_of(text, tmp_path), type(stem).__name__)(**stem.settings)
    assert {n: w.shape for n, w in again.state_dict().items()} == {
        n: w.shape for n, w in stem.state_dict().items()
    }


def test_what_is_not_needed_is_left_out(tmp_path) -> None:
    module = module_of(standalone(Hmlp, header="A stem."), tmp_path)
    assert module.__doc__ == "A stem."
    assert module.FACTORS == FACTORS
    assert not hasattr(module, "ImageEncoder")
    assert not hasattr(module, "STEMS")
    assert hasattr(module_of(standalone(Hmlp, ImageEncoder, header=""), tmp_path), "ImageEncoder")


def test_comments_above_a_definition_come_along() -> None:
    assert "# Patch size -> kernel = stride of each layer." in standalone(Hmlp, header="")


def test_a_users_own_stem_stands_alone_too(tmp_path, monkeypatch) -> None:
    source = '''
from mimkit.models.stems import STEMS
from mimkit.models.stems.linear import Linear


@STEMS.register
class Mine(Linear):
    """With a member of its own."""

    answer = 42
'''
    (tmp_path / "my_own_stem.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    import my_own_stem  # type: ignore[import-not-found]

    module = module_of(standalone(my_own_stem.Mine, header=""), tmp_path)
    assert module.Mine(width=32).answer == 42
    del sys.modules["my_own_stem"]


def test_two_things_of_one_name_are_noticed() -> None:
    from mimkit.models.stems.local import Local

    with pytest.raises(AssertionError, match=r"two things of one name: \{'_check'"):
        standalone(Hmlp, Local, header="")
