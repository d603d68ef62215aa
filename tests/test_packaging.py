"""`tokenizers/` hides no other package, the wheel works alone, and importing does no work."""

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from commands import ROOT, command, environment

from mimkit.cli import verbs

HEAVY = ("torch", "torchvision", "timm", "deepspeed", "transformers", "dall_e", "webdataset",
         "simplejpeg", "numba", "tensorboard", "skimage", "sklearn", "PIL", "numpy")  # fmt: skip


def test_the_folder_tokenizers_is_no_package_and_not_inside_mimkit() -> None:
    assert (ROOT / "tokenizers" / "dvae.py").is_file()
    assert not (ROOT / "tokenizers" / "__init__.py").exists()
    assert not (ROOT / "mimkit" / "tokenizers").exists()
    assert not (ROOT / "mimkit" / "configs").exists()


@pytest.mark.parametrize("start", ["code", "module"])
def test_import_tokenizers_is_not_ours(start: str, tmp_path: Path) -> None:
    """A package of that name on the path wins over our folder, though the checkout comes first."""
    package = tmp_path / "site" / "tokenizers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("whose = 'theirs'\n")
    show = "import tokenizers; print(tokenizers.whose, tokenizers.__file__)"
    show += "; import mimkit.tokenizers" if start == "code" else ""
    (tmp_path / "show.py").write_text(show)
    words = ["-c", show] if start == "code" else ["-m", "show"]
    path = f"{ROOT}:{package.parent}:{tmp_path}"
    ended = command(words, cwd=ROOT, env={"PYTHONPATH": path})
    assert ended.out.split() == ["theirs", str(package / "__init__.py")], ended.err


def test_import_tokenizers_is_the_one_its_metadata_names() -> None:
    """HuggingFace's, where it is installed; without it there is nothing to import at all."""
    ended = command(["-c", "import tokenizers; print(tokenizers.__file__)"], cwd=ROOT)
    try:
        files = metadata.files("tokenizers") or []
    except metadata.PackageNotFoundError:
        assert ended.out == "None\n", "a folder without __init__.py has no file"
        return
    init = next(file for file in files if file.as_posix() == "tokenizers/__init__.py")
    assert Path(ended.out.strip()).resolve() == Path(str(init.locate())).resolve(), ended.err


def _modules_after(code: str) -> set[str]:
    ended = command(["-c", f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"],
                    cwd=ROOT)  # fmt: skip
    assert ended.code == 0, ended.err
    return {name.split(".")[0] for name in json.loads(ended.out.splitlines()[-1])}


def test_import_mimkit_imports_nothing_heavy() -> None:
    loaded = _modules_after("import mimkit")
    assert "mimkit" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_a_pretraining_does_not_wait_for_what_it_does_not_use() -> None:
    """`import timm` takes as long as `import torch`, DeepSpeed is one of two engines."""
    loaded = _modules_after("import mimkit.pretraining")
    assert "torch" in loaded
    assert loaded.isdisjoint({"timm", "torchvision", "deepspeed", "transformers", "sympy"})


def test_help_and_print_config_do_not_wait_for_torch() -> None:
    helps = [[verb, "--help"] for verb in verbs()]
    code = f"""
import sys
from mimkit.cli import main
for words in {[["--help"], *helps, ["train_tokenizer", "--print-config"]]!r}:
    try:
        main(words)
    except SystemExit:
        pass
    print("LOADED", *words, [name for name in {HEAVY!r} if name in sys.modules])
"""
    ended = command(["-c", code], cwd=ROOT)
    said = [line for line in ended.out.splitlines() if line.startswith("LOADED")]
    assert len(said) == len(helps) + 2, ended.err
    assert [line for line in said if not line.endswith("[]")] == []


def test_importing_every_module_changes_nothing() -> None:
    """No seed, environment variable, log handler, thread count or path; no optional package."""
    code = """
import json, logging, os, pkgutil, importlib, random, sys, warnings
import numpy, timm, torch  # timm and what it imports set a variable and a warning filter
before = [dict(os.environ), torch.initial_seed(), torch.get_rng_state().sum().item(),
          torch.get_num_threads(), torch.get_default_dtype(), len(logging.root.handlers),
          len(warnings.filters), hash(random.getstate()), numpy.random.get_state()[1].sum(),
          sys.path[:]]
import mimkit
names = [m.name for m in pkgutil.walk_packages(mimkit.__path__, "mimkit.")
         if m.name != "mimkit.__main__"]
for name in names:
    importlib.import_module(name)
after = [dict(os.environ), torch.initial_seed(), torch.get_rng_state().sum().item(),
         torch.get_num_threads(), torch.get_default_dtype(), len(logging.root.handlers),
         len(warnings.filters), hash(random.getstate()), numpy.random.get_state()[1].sum(),
         sys.path[:]]
changed = [i for i, (old, new) in enumerate(zip(before, after)) if old != new]
print(json.dumps([len(names), changed, sorted(sys.modules)]))
"""
    ended = command(["-c", code], cwd=ROOT)
    assert ended.code == 0, ended.err
    num, changed, modules = json.loads(ended.out.splitlines()[-1])
    assert num > 60
    assert changed == []
    loaded = {name.split(".")[0] for name in modules}
    assert loaded.isdisjoint({"deepspeed", "dall_e", "webdataset", "transformers", "tensorboard",
                              "skimage", "sklearn", "numba"})  # fmt: skip


def _checkout(target: Path) -> Path:
    """The files that are built from, without what a build or an editable install left there."""
    for name in ("mimkit", "tokenizers", "configs", "tools"):
        shutil.copytree(ROOT / name, target / name,
                        ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))  # fmt: skip
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    return target


def _build(source: Path, out: Path, *what: str) -> Path:
    words = [sys.executable, "-m", "build", "--no-isolation", *what, "--outdir", str(out)]
    run = subprocess.run([*words, str(source)], env=environment(), cwd=source.parent, check=False,
                         capture_output=True, text=True, timeout=200)  # fmt: skip
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "source").mkdir()
    return _build(_checkout(folder / "source"), folder / "dist", "--wheel")


def _contents(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest()
                for name in archive.namelist()}  # fmt: skip


@pytest.mark.slow
def test_the_wheel_holds_what_a_user_needs_and_nothing_outside_mimkit(wheel: Path) -> None:
    names = set(_contents(wheel))
    tops = {name.split("/")[0] for name in names}
    assert tops == {"mimkit", next(top for top in tops if top.endswith(".dist-info"))}
    sources = {f"mimkit/{path.relative_to(ROOT / 'mimkit').as_posix()}"
               for path in (ROOT / "mimkit").rglob("*.py")}  # fmt: skip
    tokenizers = {f"mimkit/{path.relative_to(ROOT).as_posix()}"
                  for path in (ROOT / "tokenizers").rglob("*")
                  if path.suffix in (".py", ".safetensors", ".md")}  # fmt: skip
    configs = {f"mimkit/{path.relative_to(ROOT).as_posix()}"
               for path in (ROOT / "configs").rglob("*.yaml")}  # fmt: skip
    pages = {f"mimkit/{path.relative_to(ROOT / 'mimkit').as_posix()}"
             for path in (ROOT / "mimkit").rglob("*.j2")}  # fmt: skip
    assert names - {n for n in names if ".dist-info/" in n} == (
        sources | tokenizers | configs | pages | {"mimkit/py.typed"}
    )
    assert len(configs) >= 2


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    again = _build(_checkout(tmp_path / "source"), tmp_path / "dist")
    first, second = _contents(wheel), _contents(again)
    assert {name for name in first.keys() | second.keys()
            if first.get(name) != second.get(name)} == set()  # fmt: skip


@pytest.mark.slow
def test_the_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = ("import mimkit.cli, mimkit.tokenizers as t; print(mimkit.cli.__file__); "
            "print(*t.TOKENIZERS.names()); print(t.TOKENIZERS['dvae'].__module__)")  # fmt: skip
    shown = command(["-c", code], cwd=tmp_path, env={"PYTHONPATH": str(site)})
    file, names, module = shown.out.splitlines()
    assert file == str(site / "mimkit" / "cli" / "__init__.py"), shown.err
    assert names.split() == sorted(path.stem for path in (ROOT / "tokenizers").glob("[a-z]*.py"))
    assert module == "mimkit.tokenizers.dvae"
    printed = command(["-m", "mimkit", "pretrain", "--print-config"], cwd=tmp_path,
                      env={"PYTHONPATH": str(site)})  # fmt: skip
    here = command(["-m", "mimkit", "pretrain", "--print-config"], cwd=ROOT)
    assert yaml.safe_load(printed.out) == yaml.safe_load(here.out), printed.err


def test_the_checkout_is_what_is_tested() -> None:
    """An installed copy, left by a plain `pip install .`, would be tested in its place."""
    spec = importlib.util.find_spec("mimkit")
    assert spec is not None and spec.origin == str(ROOT / "mimkit" / "__init__.py")
