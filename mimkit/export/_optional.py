"""Packages that only an export needs, imported when one is written."""

import importlib
from types import ModuleType

from mimkit.errors import UserError


def optional(name: str) -> ModuleType:
    """The package; UserError names the extra that installs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise UserError(
            f"this format needs the package '{name}', which is not installed; "
            "pip install 'mimkit[export]'"
        ) from error
