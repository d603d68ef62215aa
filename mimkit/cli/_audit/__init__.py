"""`mimkit audit WHAT`: one file an audit, with `add_parser(subparsers)` and `run(arguments)`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it is slow to import, and --help does not need it
    from mimkit.config import PartConfig


def parse_part(text: str) -> "PartConfig":
    """`blockwise:min_block=4,aspect=0.5` -> the part's name and settings; values as in YAML.

    Raises:
        UserError: it is not of that form, or a setting is given twice.
    """
    import yaml

    from mimkit.config import PartConfig
    from mimkit.errors import UserError

    name, colon, rest = text.partition(":")
    if "." in name:  # a user's own part has a colon in its name: mine.py:Mine
        own, colon, rest = rest.partition(":")
        name = f"{name}:{own}"
    form = "write NAME or NAME:key=value,key=value, for example blockwise:min_block=4,aspect=0.5"
    settings = {"name": name}
    for word in rest.split(",") if colon else ():
        key, _, value = (part.strip() for part in word.partition("="))
        if not (name and key and value):
            raise UserError(f"'{word}' in '{text}' is no setting; {form}")
        if key in settings:
            raise UserError(f"'{key}' is given twice in '{text}'; {form}")
        try:
            settings[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(
                f"the value of '{key}' in '{text}' is not valid YAML; {form}"
            ) from error
    return PartConfig(**settings)
