"""The report as one HTML page, Markdown and CSV; drawn by jinja2."""

import base64
import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from mimkit.ablation.plots import diagrams
from mimkit.ablation.report import Record, save_record
from mimkit.ablation.tables import (
    cost_table,
    evidence_table,
    main_table,
    runs_table,
    views_table,
)
from mimkit.ablation.wording import (
    LEAK_LEGEND,
    TITLES,
    VIEWS_LEGEND,
    evidence_terms,
    legend,
    paired_lines,
    repeat_lines,
    setting_line,
    spent_legend,
    words,
)
from mimkit.files import atomic_file, write_text


def write_report(record: Record, pictures: Mapping[str, tuple[str, Image.Image]], folder: Path
                 ) -> Path:  # fmt: skip
    """index.html, report.md, report.csv, report.json, and what they show; gives the page.

    Args:
        pictures: file name -> title and picture.
    """
    drawn = diagrams(record)
    for name, svg in drawn.items():
        write_text(folder / "plots" / name, svg)
    for name, (_, picture) in pictures.items():
        with atomic_file(folder / "pictures" / name) as temporary:
            picture.save(temporary, "PNG")
    context = _context(record)
    files = {
        "diagrams": {name: f"plots/{name}" for name in drawn},
        "pictures": {title: f"pictures/{name}" for name, (title, _) in pictures.items()},
    }
    inside = {
        "diagrams": {name: _svg_uri(svg) for name, svg in drawn.items()},
        "pictures": {title: _png_uri(picture) for title, picture in pictures.values()},
    }
    write_text(folder / "report.md", _render("report.md.j2", context | files))
    write_text(folder / "index.html", _render("report.html.j2", context | inside))
    write_text(folder / "report.csv", _csv(record))
    save_record(record, folder / "report.json")
    return folder / "index.html"


def _context(record: Record) -> dict[str, Any]:
    return {
        "record": record,
        "setting": setting_line(record),
        "legend": legend(record),
        "evidence_terms": evidence_terms(record),
        "views_legend": VIEWS_LEGEND,
        "leak_legend": LEAK_LEGEND,
        "words": words(record),
        "main": main_table(record),
        "evidence": {TITLES[m]: evidence_table(record, m) for m in _in_order(record)},
        "views": views_table(record),
        "cost": cost_table(record),
        "paired": paired_lines(record),
        "repeat": repeat_lines(record),
        "runs": runs_table(record),
        "spent_legend": spent_legend(record),
    }


def _in_order(record: Record) -> list[str]:
    """The primary measure first."""
    primary = record["study"]["primary"]
    return [primary, *(m for m in record["measures"] if m != primary)]


def _render(template: str, context: dict[str, Any]) -> str:
    import jinja2

    html = template.endswith(".html.j2")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=html, undefined=jinja2.StrictUndefined, keep_trailing_newline=True,
    )  # fmt: skip
    return str(environment.get_template(template).render(context))


def _svg_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _png_uri(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _csv(record: Record) -> str:
    """One line for each run and measure: what another program computes from."""
    file = io.StringIO()
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(["arm", "seed", "measure", "accuracy", "heldout_loss", "gflops_paper",
                    "ms_train", "identity", "folder"])  # fmt: skip
    for run in record["runs"]:
        cost = record["arms"][run["arm"]]["cost"]
        for measure, accuracy in run["accuracy"].items():
            lines.writerow([run["arm"], run["seed"], measure, accuracy,
                            run["summary"].get("heldout_loss", ""), cost["gflops_paper"],
                            cost["ms_train"], run["identity"], run["folder"]])  # fmt: skip
    return file.getvalue()
