"""Write a run's encoder for another library, and prove that it gives the same features there.

  python tools/export.py runs/latest --format timm encoder.safetensors

The file is loaded back by the other library and run on the same images; if any number differs by
more than 1e-5, nothing is written and the exit code is 2.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="mimkit export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="a run folder or one of its checkpoints")
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--format", default="timm", help="the library to write for (default: timm)")
    arguments = parser.parse_args(argv)
    from mimkit.encoder_io import export_run

    report = export_run(arguments.run, format_name=arguments.format, out=arguments.out)
    print(
        f"wrote {report.path}: {report.parameters / 1e6:.2f} M parameters, "
        f"{report.bytes / 2**20:.1f} MiB\n"
        f"proof: on {report.images} images the outputs differ by at most "
        f"{report.max_difference:.1e} (allowed {report.tolerance:.0e})\n"
        f"load it: from mimkit.export.{arguments.format} import load; "
        f"model = load('{report.path}')"
    )
    return 0
