"""Repeat the update in which a run went wrong, and name the sample or the layer.

  mimkit replay RUN/flight/update-00000123
  mimkit replay RUN/flight/update-00000123 --update 120      an earlier update of the run

A run that fails leaves such a folder: what its flight recorder kept of the last updates. On one
CPU, without a launcher: the newest checkpoint before the update is loaded, the updates since then
are made again, and the update itself with an eye on every layer, sample and gradient.

exit code: 0 something was found, 1 nothing is wrong in the update here, 2 it could not be repeated
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mimkit.errors import UserError

if TYPE_CHECKING:  # slow to import, and --help does not need it
    from mimkit.replay import Replayed

_SHOWN = 8


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="mimkit replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("dump", type=Path, metavar="DUMP",
                        help="RUN/flight/update-00000123, or a file in it")  # fmt: skip
    parser.add_argument("--update", type=int, metavar="N",
                        help="repeat this one, counted from 1 (default: the first that is not "
                        "finite, or the last one)")  # fmt: skip
    arguments = parser.parse_args(argv)
    if not arguments.dump.exists():
        raise UserError(f"there is no {arguments.dump}; give RUN/flight/update-00000123")
    from mimkit.replay import replay

    found = replay(arguments.dump, update=arguments.update, say=_say)
    print(_text(found))
    return 0 if found.found else 1


def _say(text: str) -> None:
    print(text, flush=True)


def _text(found: "Replayed") -> str:
    recorded = "" if found.recorded_loss is None else f", recorded {found.recorded_loss:.6g}"
    lines = [
        f"the run stopped because: {found.dump.reason.split('. ')[0]}",
        f"update {found.update + 1} from update {found.start}: loss {found.loss:.6g}{recorded}",
    ]
    if found.origins:
        lines.append(f"first not finite: {found.origins[0].what}")
        lines += [f"  then: {origin.what}" for origin in found.origins[1:_SHOWN]]
        if (more := len(found.origins) - _SHOWN) > 0:
            lines.append(f"  and {more} more")
    elif found.suspects:
        lines.append("every value is finite; samples whose loss is over three times the median:")
    else:
        lines.append(
            "every value is finite here, and no sample sticks out. A run on a GPU or in bf16 is "
            "not repeated to the last bit: try --update with the one before"
        )
    for one in found.suspects[:_SHOWN]:
        loss = "" if one.loss is None else f", loss {one.loss:.4g}"
        lines.append(f"  sample {one.index}, key '{one.key}', in {one.origin} "
                     f"(row {one.row} of the batch{loss})")  # fmt: skip
    return "\n".join(lines)
