"""Checkpoints written while training goes on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from mimkit.train.checkpoint import Checkpoint, Saved


class BackgroundSaver:
    """One thread that writes one checkpoint at a time.

    What is written are copies on the CPU, which `Runtime.weights` and `moments` are, so training
    can change the weights meanwhile. A process that is killed leaves the checkpoint before.

    Args:
        save: writes a checkpoint.
        told: called with what was saved, in the thread that trains.
    """

    def __init__(
        self, save: Callable[[Checkpoint], Saved], *, told: Callable[[Checkpoint, Saved], None]
    ) -> None:
        self._save, self._told = save, told
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mimkit-save")
        self._writing: tuple[Checkpoint, Future[Saved]] | None = None

    def __enter__(self) -> "BackgroundSaver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """What is being written is written, also where training ends by an error; that is told."""
        if kind is None:
            self.wait()
        elif self._writing is not None:
            self._writing[1].exception()

    def start(self, checkpoint: Checkpoint) -> None:
        """Waits for the one before. Raises UserError if that could not be written."""
        self.wait()
        self._writing = checkpoint, self._thread.submit(self._save, checkpoint)

    def wait(self) -> None:
        """Until nothing is being written. Raises UserError if it could not be."""
        if self._writing is not None:
            (checkpoint, written), self._writing = self._writing, None
            self._told(checkpoint, written.result())

    def look(self) -> None:
        """`wait` if there is nothing to wait for: a full disk is told soon, not at the next one."""
        if self._writing is not None and self._writing[1].done():
            self.wait()
