"""What else differs between arms: an undeclared difference is refused, a declared one is shown."""

from mimkit.config import Config, StudyConfig, differences, science_of
from mimkit.errors import UserError

_BUDGETED = ("train.steps", "train.epochs")  # differ by arm where FLOPs or time are equal


def check_confounds(study: StudyConfig, arms: dict[str, Config]) -> dict[str, list[str]]:
    """Of each arm, what differs from the reference besides what the study varies.

    Raises:
        UserError: an arm differs in what it does not declare, declares what does not differ, or is
            the same as another one.
    """
    _check_twins(study, arms)
    reference = science_of(arms[study.reference])
    found = {}
    for name, config in arms.items():
        lines = differences(reference, science_of(config))
        free = [*study.varies, *(_BUDGETED if study.budget != "steps" else ())]
        other = [line for line in lines if not _below(_key(line), free)]
        declared = study.present_arms[name].declares
        if hidden := [line for line in other if not _below(_key(line), declared)]:
            keys = ", ".join(_key(line) for line in hidden)
            raise UserError(
                f"arm '{name}' differs from '{study.reference}' in more than {_list(study.varies)}"
                f": {'; '.join(hidden)}. What it is compared by would be confounded; make them "
                f"equal, or declare it: arms.{name}.declares=[{keys}]"
            )
        if idle := [key for key in declared if not any(_below(_key(x), [key]) for x in lines)]:
            raise UserError(
                f"arm '{name}' declares {_list(idle)}, which does not differ from "
                f"'{study.reference}'; leave it out of arms.{name}.declares"
            )
        own = study.present_arms[name].classifier
        found[name] = [*other, *(f"classifier.{line}" for line in differences({}, own))]
    return found


def _check_twins(study: StudyConfig, arms: dict[str, Config]) -> None:
    seen: dict[str, str] = {}
    for name, config in arms.items():
        key = repr([science_of(config), study.present_arms[name].classifier])
        if key in seen:
            raise UserError(
                f"arms '{seen[key]}' and '{name}' are the same runs; leave one of them out, or "
                f"change arms.{name}.settings"
            )
        seen[key] = name


def _key(line: str) -> str:
    return line.partition(":")[0]


def _below(key: str, prefixes: list[str] | tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)


def _list(keys: list[str]) -> str:
    return ", ".join(keys)
