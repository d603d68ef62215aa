"""Signals that ask a run to stop: SIGTERM, SIGUSR1 (Slurm's --signal) and Ctrl-C."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from mimkit.errors import Interrupted

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: "try again later", for whoever starts runs
_ASKING = (signal.SIGTERM, signal.SIGUSR1)
_Handler = Callable[[int, FrameType | None], Any]


def exit_code(name: str) -> int:
    """130 after Ctrl-C, whose author does not want the run started again; else 75."""
    return 130 if name == "SIGINT" else EXIT_CODE


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGUSR1 raise `Interrupted` inside, as Ctrl-C raises KeyboardInterrupt."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Interrupted(signal.Signals(number).name, "it was not training")

    with _handled(dict.fromkeys(_ASKING, stop)):
        yield


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """SIGTERM and SIGUSR1 wait for this to end; in a process started inside, for `let_in`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def let_in() -> Iterator[None]:
    """SIGTERM and SIGUSR1 come in, those that waited too; afterwards they wait again."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)


class StopRequests:
    """Notes inside `with` that somebody asked to stop; a second Ctrl-C ends the process at once.

    A launcher that is told to stop passes SIGTERM on, often right after the terminal's Ctrl-C has
    reached this process too: only the first signal counts.

    Attributes:
        signal: name of the first, or None.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._launcher = _launcher_of_this_process()
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> "StopRequests":
        self._exit.enter_context(
            _handled({number: self._note for number in (*_ASKING, signal.SIGINT)})
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """A rank that leaves during its start breaks the others' connections: no failure of theirs
        where they were asked to stop too."""
        try:
            yield
        except RuntimeError as error:
            if self.signal is None:
                raise
            why = str(error).partition("\n")[0]
            raise Interrupted(self.signal, f"nothing was saved ({why})") from error

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == "SIGINT":
            os._exit(130)
        self.signal = self.signal or signal.Signals(number).name

    def asked(self) -> bool:
        """Whether to stop: a signal came, or the launcher was ended and has left this process.

        `deepspeed` ends at SIGTERM without passing it on. Takes some 20 us.
        """
        if self.signal is None and self._launcher and _launcher_of_this_process() != self._launcher:
            self.signal = "SIGTERM"
        return self.signal is not None


@contextlib.contextmanager
def _handled(handlers: dict[signal.Signals, _Handler]) -> Iterator[None]:
    """Python takes signals in the main thread only; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """For a process that is about to end, and for loader processes: a signal to the whole group is
    the training process's to obey.

    It ends them when it has saved; and they end by themselves when it is gone.
    """
    for number in (*_ASKING, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _launcher_of_this_process() -> tuple[int, ...]:
    """The process above this one if it is a launcher's; of `deepspeed`, which is two, both."""
    parent = os.getppid()
    try:
        words = Path(f"/proc/{parent}/cmdline").read_bytes()
        fields = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8").rpartition(")")[2]
    except OSError:  # no such folder on this system, or no such process any more
        return ()
    if b"deepspeed.launcher.launch" in words:
        return (parent, int(fields.split()[1]))
    return (parent,) if b"torch.distributed.run" in words or b"torchrun" in words else ()
