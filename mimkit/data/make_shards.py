"""A folder of images, or tars -> shards: every image decoded once, strictly, before it is kept.

The shards are written in `OUT.partial`, together with a file that says how far it got, and the
folder gets the name `OUT` when it is complete. So whatever stops a run, nothing that looks
complete is left, and the same call goes on after the last whole shard.
"""

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mimkit.data._resume import Settings, State, alone_in, find_complete, load_state
from mimkit.data.decode import DecodeError, decode_image, image_format
from mimkit.data.image_folder import unique_keys
from mimkit.data.patterns import UNFINISHED
from mimkit.data.remote.catalogue import check_room
from mimkit.data.sources.folder import FolderSource
from mimkit.data.sources.shards import ShardSource
from mimkit.data.writer import FAILURES, Failure, Item, write_failures, write_manifest, write_shard
from mimkit.errors import UserError
from mimkit.files import disk_errors, remove_temporary, sync
from mimkit.random import Purpose, generator

Progress = Callable[[int, int], None]
_A_FEW = 10
_PATTERN = frozenset("*?[{,:")  # of several files, or of files on a server


@dataclass(frozen=True)
class Report:
    """What lies in `out` after `make_shards`."""

    out: Path
    num_samples: int
    num_shards: int
    num_bytes: int
    failures: list[Failure]
    was_complete: bool  # nothing had to be done


def make_shards(
    src: str | Path,
    out: Path,
    *,
    name: str = "train",
    samples_per_shard: int = 1000,
    max_failures: float = 0.01,
    shuffle_seed: int = 0,
    cache_dir: str | Path = "~/.cache/mimkit",
    progress: Progress = lambda done, total: None,
) -> Report:
    """Writes `out/NAME-00000.tar`, ..., an index beside each, manifest.json and classes.json.

    Args:
        src: a folder of images (see `list_images`), or tars (see `expand_shards`).
        samples_per_shard: at most; the shards are of nearly equal length.
        max_failures: share of bad images above which the whole is refused, if there are more than
            ten; 0 allows none.
        shuffle_seed: key of the order, so that classes are mixed.
        cache_dir: where the indexes of read-only tars go.
        progress: called with the number of images done, and of all.

    Raises:
        UserError: `src` cannot be read, too many bad images, `out` holds something else, or the
            disk is full.
    """
    if samples_per_shard < 1:
        raise UserError(f"{samples_per_shard} samples a shard; expected at least 1.")
    source = _open(src, cache_dir)
    settings: Settings = {
        "name": name,
        "samples_per_shard": samples_per_shard,
        "shuffle_seed": shuffle_seed,
        "source_digest": source.digest,
    }
    done = find_complete(out, settings)
    if done is not None:
        return _report(out, done, was_complete=True)
    partial = out.with_name(out.name + ".partial")
    remedy = "Free space or choose another OUT; the same command goes on after the last whole shard"
    with disk_errors(partial, f"{remedy}, or remove that folder."):
        partial.mkdir(parents=True, exist_ok=True)
        with alone_in(partial):
            remove_temporary(partial)
            state = load_state(partial, settings)
            try:
                _write_shards(source, partial, state, max_failures, progress)
            finally:
                if not state.records:  # nothing to go on from
                    shutil.rmtree(partial)
            _complete(source, str(src), partial, out, state)
    return _report(out, state, was_complete=False)


def _open(src: str | Path, cache_dir: str | Path) -> FolderSource | ShardSource:
    path = Path(src).expanduser()
    if path.is_dir() and not any(path.glob("*.tar*")):
        return FolderSource(folder=path)
    if not path.exists() and not _PATTERN.intersection(str(src)):
        raise UserError(f"there is no {src}; give a folder of images, or tars")
    source = ShardSource(shards=str(src), cache_dir=cache_dir, unique=False)
    check_room(source.tars, num=len(source.tars), why="all, since their samples are mixed")
    return source


def _write_shards(
    source: FolderSource | ShardSource,
    folder: Path,
    state: State,
    max_failures: float,
    progress: Progress,
) -> None:
    """Writes the shards that `state` has not yet, and saves it after each."""
    name, total = str(state.settings["name"]), len(source)
    rng = generator(Purpose.ORDER, seed=int(state.settings["shuffle_seed"]))
    num_shards = math.ceil(total / int(state.settings["samples_per_shard"]))
    plan = np.array_split(rng.permutation(total), num_shards)
    keys = unique_keys(source.keys)
    done = sum(len(part) for part in plan[: len(state.records)])
    progress(done, total)
    _check_failures(state, done, total, max_failures, folder)  # of a command before this one
    for part in plan[len(state.records) :]:
        failures: list[Failure] = []
        items = _items(source, keys, part.tolist(), failures, _shifted(progress, done, total))
        path = folder / f"{name}-{len(state.shards):05d}.tar"
        state.records.append(write_shard(path, items, split=name))
        state.failures.extend(failures)
        state.save(folder)
        done += len(part)
        _check_failures(state, done, total, max_failures, folder)


def _allowed(max_failures: float, total: int) -> float:
    """A few bad images are never fatal, unless they are all or none is wanted."""
    return min(max(max_failures * total, _A_FEW), total - 1) if max_failures else 0


def _shifted(progress: Progress, start: int, total: int) -> Callable[[int], None]:
    return lambda count: progress(start + count, total)


def _items(
    source: FolderSource | ShardSource,
    keys: list[str],
    indices: list[int],
    failures: list[Failure],
    tick: Callable[[int], None],
) -> Iterator[Item]:
    """The sound images among `indices`; the others are added to `failures`."""
    for count, index in enumerate(indices, start=1):
        try:
            sample = source[index]
            decode_image(sample.image)
        except DecodeError as error:
            failures.append(Failure(keys[index], source.origin(index), str(error)))
        else:
            yield Item(keys[index], sample.image, image_format(sample.image), sample.label)
        tick(count)


def _check_failures(state: State, done: int, total: int, max_failures: float, folder: Path) -> None:
    """UserError if more of the first `done` images were bad than are allowed."""
    failures, allowed = state.failures, _allowed(max_failures, total)
    if len(failures) <= allowed:
        return
    write_failures(folder / FAILURES, failures)
    first = "; ".join(f"{failure.origin}: {failure.cause}" for failure in failures[:3])
    raise UserError(
        f"{len(failures)} of the first {done} images ({total} in all) cannot be decoded; allowed "
        f"are {allowed:g} (--max-failures {max_failures:g}). The first are: "
        f"{first}. All are listed in {folder / FAILURES}. Mend the source, remove that folder and "
        "start again; or go on without them by the same command with a higher --max-failures."
    )


def _complete(
    source: FolderSource | ShardSource, src: str, partial: Path, out: Path, state: State
) -> None:
    """Describes the shards of `partial` and gives it the name `out`."""
    write_manifest(
        partial,
        state.shards,
        source=src,
        classes=source.classes,
        failures=state.failures,
        settings=state.settings,
    )
    sync(partial)
    partial.rename(out)
    (out / UNFINISHED).unlink()
    sync(out.absolute().parent)


def _report(out: Path, state: State, *, was_complete: bool) -> Report:
    return Report(
        out=out,
        num_samples=sum(record.samples for record in state.shards),
        num_shards=len(state.shards),
        num_bytes=sum(record.bytes for record in state.shards),
        failures=state.failures,
        was_complete=was_complete,
    )
