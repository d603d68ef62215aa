"""The exception for what a user can mend: the command line prints it as one paragraph."""


class UserError(ValueError):
    """Something given from outside is wrong: a setting, a file, a command.

    The message says what was found, what was expected, and the setting or command that mends it.
    `mimkit.cli` prints it without a traceback and ends with exit code 2.
    """
