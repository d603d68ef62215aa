"""What a user writes for `shards` -> a list of tars: paths that exist, and addresses."""

import glob
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mimkit.data.braces import expand_braces
from mimkit.data.remote.urls import expand_url, is_url
from mimkit.errors import UserError

UNFINISHED = "unfinished.json"  # lies in a folder of shards that make_shards has not completed


def expand_shards(shards: str | Sequence[str]) -> list[Path]:
    """The local tars that `shards` names: paths, folders, globs, brace patterns, or a list.

    A folder means all its *.tar, sorted; `{0000..0012}` counts with leading zeros; a path that
    exists is taken as it is, whatever characters it holds.

    Raises:
        UserError: a URL; missing files (all named); nothing found; a tar named twice.
    """
    for pattern in [shards] if isinstance(shards, str) else shards:
        if is_url(pattern):
            raise UserError(f"'{pattern}' is no local path; shards are wanted here that are.")
    return [place for place in expand_places(shards) if isinstance(place, Path)]


def expand_places(shards: str | Sequence[str]) -> list[Path | str]:
    """Local tars as in `expand_shards`, and addresses, which stay text, in the order given.

    Raises:
        UserError: as in `expand_shards`, or an address that `check_url` refuses. Whether others
            exist is for their server to say.
    """
    patterns = [shards] if isinstance(shards, str) else list(shards)
    if not patterns or not all(patterns):
        raise UserError(
            "the name of the shards is empty; expected a tar, a folder of tars, a glob, a pattern "
            "such as train-{0000..0012}.tar, or an address (data.train, data.heldout)."
        )
    names = [name for pattern in patterns for name in _braces(pattern)]
    local = [name for name in names if not is_url(name)]
    missing = [name for name in local if not _has_glob(name) and not Path(name).exists()]
    if missing:
        raise UserError(_missing(missing, len(names)))
    places = [place for name in names for place in ([name] if is_url(name) else _expand(name))]
    twice = [str(place) for place, count in Counter(places).items() if count > 1]
    if twice:
        raise UserError(f"the shards {', '.join(twice[:3])} are named more than once.")
    return places


def _braces(pattern: str) -> list[str]:
    if is_url(pattern):
        return expand_url(pattern)
    pattern = str(Path(pattern).expanduser())
    if Path(pattern).exists() or "{" not in pattern:
        return [pattern]
    names = expand_braces(pattern)
    if hidden := [name for name in names if is_url(name)]:
        raise UserError(f"'{pattern}' stands for '{hidden[0]}', which is refused: it is no path.")
    return names


def _has_glob(name: str) -> bool:
    return not Path(name).exists() and any(character in name for character in "*?[")


def _expand(name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        found = sorted(file for file in path.glob("*.tar") if file.is_file())
        if (path / UNFINISHED).exists():
            raise UserError(
                f"{path} was left by an interrupted make_shards; run that again to complete it."
            )
    else:
        found = [path] if path.exists() else [Path(hit) for hit in _glob(name)]
    if not found:
        folder, sought = (path, "*.tar") if path.is_dir() else (path.parent, path.name)
        raise UserError(f"no shard found: looked for {sought} in {folder}.{_neighbours(folder)}")
    return found


def _glob(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207  (Path.glob wants a root)


def _missing(missing: list[str], total: int) -> str:
    listed = ", ".join(missing[:10]) + (f" and {len(missing) - 10} more" if missing[10:] else "")
    return (
        f"{len(missing)} of {total} shards do not exist: {listed}."
        f"{_neighbours(Path(missing[0]).parent)}"
    )


def _neighbours(folder: Path) -> str:
    """What lies there instead, and what to do about it."""
    if not folder.is_dir():
        return f" There is no folder {folder}."
    if folder == Path():
        folder = Path.cwd()
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    packed = [name for name in names if name.endswith((".tar.gz", ".tgz"))]
    if packed:
        return (
            f" {folder} holds {len(packed)} compressed tars ({packed[0]}, ...): unpack them with "
            f"gunzip -k {folder}/*{Path(packed[0]).suffix}"
        )
    tars = [name for name in names if name.endswith(".tar")]
    if tars:
        return f" {folder} holds {len(tars)} tars: {tars[0]} ... {tars[-1]}."
    listed = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    make = " tools/make_shards.py makes shards from a folder of images."
    return (f" {folder} holds: {listed}." if names else f" {folder} is empty.") + make
