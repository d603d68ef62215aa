"""The exception for what a user can mend: the command line prints it as one paragraph."""

import traceback


class UserError(ValueError):
    """Something given from outside is wrong: a setting, a file, a command.

    The message says what was found, what was expected, and the setting or command that mends it.
    `mimkit.cli` prints it without a traceback and ends with exit code 2.
    """


class ToldByAnotherError(UserError):
    """Every rank knows of it, and another one's `UserError` says it: this one ends without a
    word."""


def found_by_all(message: str, *, speaks: bool) -> UserError:
    """What every rank found alike: the error of the one that says so, or that of the others."""
    return UserError(message) if speaks else ToldByAnotherError(message)


def last_line_in(error: Exception, file: str) -> int | None:
    """Of a user's own file: where it is wrong, or was left last; None where it was not entered."""
    if isinstance(error, SyntaxError):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == file), None)


class Interrupted(BaseException):
    """The run was asked to stop by a signal, and could stop in good order.

    No Exception, as KeyboardInterrupt is none: nothing on the way up takes it for an error.

    Attributes:
        signal: its name: SIGTERM, SIGUSR1 or SIGINT.
        done: what is to be said about how the run was left.
    """

    def __init__(self, signal: str, done: str) -> None:
        super().__init__(f"{signal}: {done}")
        self.signal, self.done = signal, done
