"""Imports go down, heavy packages have one importer each, and what is dangerous is nowhere.

Read from the source, so that an import inside a function counts like one at the top.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Modules and folders of mimkit by floor; `tokenizers` stands for the interface and tokenizers/*.py.
FLOORS = {
    0: {"batch", "class_names", "config", "errors", "files", "interrupts", "ports", "random",
        "registry", "resources", "weight_files", "weight_names"},
    1: {"masks", "models", "tokenizers"},
    2: {"contracts", "data", "train", "downstream", "export", "importing", "token_bank"},
    3: {"build"},
    4: {"ablation", "audit", "banks", "bench", "classifier_io", "encoder_card", "encoder_export",
        "encoder_io", "encoder_probes", "estimate", "evaluation", "evaluation_notes", "finetuning",
        "finetuning_parts", "finetuning_report", "kernels", "pretraining", "probing", "replay",
        "runs", "schedule_plot", "session", "session_data", "snapshots", "tokenizer_report",
        "tokenizer_training", "vqkd_training"},
    5: {"cli", "drills", "tools"},
}  # fmt: skip
FLOOR = {unit: floor for floor, units in FLOORS.items() for unit in units}
ALONE = {1, 2}  # floors whose units do not import each other
NO_FLOOR = {"mimkit/__init__.py", "mimkit/__main__.py", "setup.py"}

ONE_IMPORTER = ("braceexpand", "dall_e", "deepspeed", "fsspec", "huggingface_hub", "jinja2",
                "numba", "onnx", "onnxruntime", "onnxscript", "psutil", "simplejpeg",
                "torchmetrics", "transformers", "webdataset")  # fmt: skip
# No model: `import timm` takes as long as `import torch`. Finetuning takes augmentations, losses
# and LAMB; teachers are timm's models; the exporter is the other end.
IMPORTERS_OF_TIMM = {
    "mimkit/data/labelled_views.py",
    "mimkit/train/classification_step.py",
    "mimkit/train/mixing.py",
    "mimkit/train/optimizer.py",
    "mimkit/export/timm.py",
    "tokenizers/_teacher.py",
    "tokenizers/_vqkd_model.py",
}


def _files() -> list[Path]:
    return [path for folder in ("mimkit", "tokenizers", "tools")
            for path in sorted((ROOT / folder).rglob("*.py"))]  # fmt: skip


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


SOURCES = {_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in _files()}


@cache
def _imports(name: str) -> tuple[str, ...]:
    """Dotted names of everything the file imports: `from mimkit import build` is mimkit.build."""
    return tuple(_every_import(name))


def _every_import(name: str) -> Iterator[str]:
    for node in ast.walk(SOURCES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} line {node.lineno}: imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "optional":
            # mimkit.export._optional imports what is named there
            yield from (str(a.value) for a in node.args if isinstance(a, ast.Constant))


def _unit(dotted: str) -> str | None:
    """`mimkit.data.order.Order` -> data; None for what is not ours or has no floor."""
    first, *rest = dotted.split(".")
    return rest[0] if first == "mimkit" and rest and rest[0] in FLOOR else None


def _own_unit(name: str) -> str:
    parts = Path(name).with_suffix("").parts
    return parts[1] if parts[0] == "mimkit" else parts[0]


def test_every_file_has_a_floor() -> None:
    units = {_own_unit(name) for name in SOURCES if name not in NO_FLOOR}
    assert units == set(FLOOR)


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in NO_FLOOR])
def test_imports_go_down(name: str) -> None:
    own = _own_unit(name)
    for dotted in _imports(name):
        unit = _unit(dotted)
        if unit in (None, own):
            continue
        assert FLOOR[unit] <= FLOOR[own], f"{name} imports {dotted} from a floor above it"
        assert FLOOR[unit] < FLOOR[own] or FLOOR[own] not in ALONE, (
            f"{name} imports {dotted}: {own} and {unit} stand beside each other"
        )


def test_the_configuration_is_read_in_build_and_above_only() -> None:
    readers = {
        name for name in SOURCES if any(d.startswith("mimkit.config") for d in _imports(name))
    }
    below = {
        name
        for name in readers
        if _own_unit(name) != "config" and FLOOR[_own_unit(name)] < FLOOR["build"]
    }
    assert readers >= {"mimkit/build.py", "mimkit/runs.py"}
    assert not below


def test_no_module_imports_itself_by_way_of_others() -> None:
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name
               for name in SOURCES}  # fmt: skip
    modules = {(f"mimkit.{m}" if m.startswith("tokenizers") else m): n for m, n in modules.items()}
    edges = {}
    for module, name in modules.items():
        prefixes = {d if d in modules else d.rpartition(".")[0] for d in _imports(name)}
        edges[module] = {p for p in prefixes if p in modules and p != module}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above[above.index(module) :], module))
        if module not in done:
            for other in sorted(edges[module]):
                visit(other, (*above, module))
            done.add(module)

    for module in modules:
        visit(module, ())
    assert "mimkit.session" in edges["mimkit.pretraining"]  # the graph is not an empty one


def _importers(package: str) -> set[str]:
    return {name for name in SOURCES if any(d.split(".")[0] == package for d in _imports(name))}


@pytest.mark.parametrize("package", ONE_IMPORTER)
def test_a_heavy_package_has_one_importer(package: str) -> None:
    assert len(_importers(package)) <= 1, _importers(package)


def test_timm_has_the_importers_that_are_written_down() -> None:
    assert _importers("timm") == IMPORTERS_OF_TIMM


KEYWORDS = ("shell=True", "strict=False", "allow_pickle=True", "weights_only=False")


def _dangers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of pickles, evaluated text, shells, and weights that may match nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save"):
            yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Name) and node.id in ("eval", "exec"):
            yield node.lineno, node.id
        if isinstance(node, ast.keyword) and ast.unparse(node) in KEYWORDS:
            yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None), *(alias.name for alias in node.names)]
            yield from ((node.lineno, n) for n in names if n in ("pickle", "cloudpickle", "dill"))


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_is_unpickled_evaluated_or_half_loaded(name: str) -> None:
    assert list(_dangers(SOURCES[name])) == []


@pytest.mark.parametrize(
    "text",
    ["torch.load(path)", "import pickle", "from pickle import loads", "eval(text)", "exec(text)",
     "run(words, shell=True)", "model.load_state_dict(weights, strict=False)"],
)  # fmt: skip
def test_the_search_for_dangers_finds_them(text: str) -> None:
    assert list(_dangers(ast.parse(text)))


def test_the_environment_is_read_by_commands_and_runtimes_only() -> None:
    readers = {
        name
        for name, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv", "putenv", "environb")
    }
    # a study's processes are launched: each is given the GPUs of its slot
    allowed = ("mimkit/ablation/processes.py", "mimkit/cli/", "mimkit/drills/",
               "mimkit/train/runtimes/", "tools/")  # fmt: skip
    assert readers, "the launcher's variables are read somewhere"
    assert {name for name in readers if not name.startswith(allowed)} == set()
