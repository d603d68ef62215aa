"""What only a report needs, imported when it is written."""

from types import ModuleType

from mimkit.errors import UserError


def load_jinja2() -> ModuleType:
    """jinja2, of the extra `report`; called before hours of training that end in a report.

    Raises:
        UserError: it is not installed.
    """
    try:
        import jinja2
    except ModuleNotFoundError as error:
        if error.name != "jinja2":
            raise
        raise UserError(
            "the report of a study needs the package 'jinja2', which is not installed; "
            "pip install 'mimkit[report]'"
        ) from error
    return jinja2
