"""What ranks must know alike: that one of them found something wrong, and a checkpoint."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from mimkit.errors import ToldByAnotherError, UserError
from mimkit.train import checkpoint
from mimkit.train.checkpoint import Checkpoint
from mimkit.train.runtimes import Runtime


@contextmanager
def told_once(runtime: Runtime) -> Iterator[None]:
    """Around what ranks do each for itself: what is wrong there stops all, and one of them says it.

    Every rank must enter it, and nothing inside may wait for another rank.

    Raises:
        UserError: on the first rank that found something wrong: its own.
        ToldByAnotherError: on all others, whether they found it too or not.
    """
    mine: UserError | None = None
    try:
        yield
    except UserError as error:
        mine = error
    found = runtime.gather(None if mine is None else str(mine))
    speaker = next((rank for rank, text in enumerate(found) if text is not None), None)
    if speaker is None:
        return
    if speaker == runtime.rank and mine is not None:
        raise mine
    raise ToldByAnotherError(found[speaker])


def load_everywhere(path: Path, runtime: Runtime) -> Checkpoint:
    """The checkpoint that rank 0 chose. Where a machine does not see it, rank 0 sends it to all,
    tensor by tensor. Every rank must call it."""
    if not runtime.any(not path.exists()):
        return checkpoint.load(path, check=False)
    mine = checkpoint.load(path, check=False) if runtime.rank == 0 else None
    found: Checkpoint = runtime.from_rank_0(None if mine is None else _numbers_of(mine))
    weights = _sent({} if mine is None else mine.weights, runtime)
    moments = _sent({} if mine is None else mine.moments, runtime)
    average = _sent((mine and mine.average) or {}, runtime) or None
    return replace(found, weights=weights, moments=moments, average=average)


def _numbers_of(whole: Checkpoint) -> Checkpoint:
    """Without its tensors."""
    return replace(whole, weights={}, moments={}, average=None)


def _sent(tensors: Mapping[str, Tensor], runtime: Runtime) -> dict[str, Tensor]:
    keys: list[str] = runtime.from_rank_0(list(tensors))
    return {key: runtime.from_rank_0(tensors.get(key)) for key in keys}
