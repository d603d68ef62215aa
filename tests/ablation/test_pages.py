"""Page, Markdown and CSV as drawn from a stored record: the same numbers, and who can read them."""

import csv
import re
import xml.etree.ElementTree as ET
from base64 import b64decode
from collections import defaultdict
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import ROOT
from matplotlib.figure import Figure
from PIL import Image

from mimkit.ablation.pages import write_report
from mimkit.ablation.plots import _against_flops, _against_time
from mimkit.ablation.report import load_record
from mimkit.ablation.wording import TITLES

EXAMPLES = sorted(path.parent for path in (ROOT / "docs" / "examples").glob("*/report.json"))


@pytest.fixture(scope="module", params=EXAMPLES, ids=lambda folder: folder.name)
def record(request: pytest.FixtureRequest) -> dict[str, Any]:
    return load_record(request.param)


@pytest.fixture(scope="module")
def written(record: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    picture = Image.new("RGB", (8, 8))
    write_report(record, {"masks.png": ("Masks of the first samples.", picture)}, folder)
    return folder


@dataclass
class _Page(HTMLParser):
    """What a page loads, its outline, and its tables as rows of text."""

    def __post_init__(self) -> None:
        super().__init__()

    attributes: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    tables: list[list[list[str]]] = field(default_factory=list)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
        self._cell = tag in ("th", "td", "span", "wbr")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("th", "td"):
            self._cell = False

    def handle_data(self, data: str) -> None:
        if self.tables and self._cell:
            self.tables[-1][-1][-1] += data

    def of(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.attributes if tag in tags]


@pytest.fixture(scope="module")
def page(written: Path) -> _Page:
    found = _Page()
    found.feed((written / "index.html").read_text(encoding="utf-8"))
    return found


def _markdown_tables(text: str) -> list[list[list[str]]]:
    blocks = re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE)
    rows = [[[cell.strip() for cell in line.strip("|").split("|")]
             for line in block.strip().split("\n")] for block in blocks]  # fmt: skip
    return [[one[0], *one[2:]] for one in rows]


def test_page_and_markdown_have_the_same_tables_cell_by_cell(
    written: Path, page: _Page, record: dict[str, Any]
) -> None:
    markdown = _markdown_tables((written / "report.md").read_text(encoding="utf-8"))
    assert len(markdown) == len(page.tables) == 4 + len(record["measures"])
    assert page.tables == markdown


def test_csv_gives_the_means_and_differences_of_the_table(
    written: Path, page: _Page, record: dict[str, Any]
) -> None:
    found: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    gflops: dict[str, float] = {}
    with (written / "report.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found[row["arm"], row["measure"]][row["seed"]] = float(row["accuracy"])
            gflops[row["arm"]] = float(row["gflops_paper"])
    header, *rows = page.tables[0]
    for cells in rows:
        line = dict(zip(header, cells, strict=True))
        assert float(line["GFLOPs (paper's rule)"]) == pytest.approx(gflops[line["arm"]], rel=5e-3)
        cost = record["arms"][line["arm"]]["cost"]
        assert cost["gflops_paper"] == gflops[line["arm"]] and "gflops" not in cost
        assert cost["gmacs"] == pytest.approx(gflops[line["arm"]], rel=0.1), "norms are the rest"
        for measure in record["measures"]:
            mean = 100 * np.mean(list(found[line["arm"], measure].values()))
            assert line[f"{TITLES[measure]}, %"].split(" ")[0] == f"{mean:.2f}"
        if line["arm"] != "linear":
            primary = record["study"]["primary"]
            mine, other = found[line["arm"], primary], found["linear", primary]
            gain = 100 * np.mean([mine[seed] - other[seed] for seed in mine])
            assert line["minus linear, points"].split(" ")[0] == f"{gain:+.2f}"
    assert load_record(written) == record


def test_an_arm_at_chance_says_so_in_its_rows(record: dict[str, Any], tmp_path: Path) -> None:
    """As if so many images were of one class that a good part of the runs were no better."""
    measure, rows = record["study"]["primary"], record["arms"]
    by_seed = {arm: list(found["by_seed"][measure].values()) for arm, found in rows.items()}
    share = float(np.median(list(by_seed.values())))
    changed = {**record, "most_common_class": {measure: share}}
    write_report(changed, {}, tmp_path)
    main_rows, *_, runs = _markdown_tables((tmp_path / "report.md").read_text(encoding="utf-8"))
    column = main_rows[0].index(f"{TITLES[measure]}, %")
    cells = {row[0]: row[column].partition(" at chance")[1:] for row in main_rows[1:]}
    for arm, accuracies in by_seed.items():
        low = sum(one <= share for one in accuracies)
        said = "" if low == len(accuracies) else f" with {low} of {len(accuracies)} seeds"
        assert cells[arm] == ((" at chance", said) if low else ("", ""))
    column = runs[0].index(f"{TITLES[measure]}, %")
    assert [row[column].endswith(" at chance") for row in runs[1:]] == [
        run["accuracy"][measure] <= share for run in record["runs"]
    ]


def test_costs_are_drawn_from_zero_and_no_arm_hides_another(record: dict[str, Any]) -> None:
    for draw in (_against_flops, _against_time):
        axes = Figure().subplots()
        assert draw(axes, record)
        assert axes.get_xlim()[0] == 0
        markers = [line for line in axes.lines if line.get_marker() not in ("None", None)]
        assert len(markers) == len(record["arms"]) == len({one.get_markersize() for one in markers})
        assert {one.get_markerfacecolor() for one in markers} == {"none"}
        assert all(0 < one.get_xdata()[0] < axes.get_xlim()[1] for one in markers)


def test_the_page_needs_nothing_else(page: _Page) -> None:
    loads = [
        one.get("src") or one.get("href") or "" for one in page.of("img", "a", "link", "script")
    ]
    images = [one for one in loads if one.startswith("data:image/")]
    assert len(images) == 5 and set(loads) - set(images) == {"#words"}
    for image in images:
        if image.startswith("data:image/svg"):
            ET.fromstring(b64decode(image.partition(",")[2]))


def test_the_page_can_be_read_by_all(written: Path, page: _Page) -> None:
    assert page.of("html")[0]["lang"] == "en" and len(page.of("main")) == 1
    assert all(one["alt"] for one in page.of("img"))
    levels = [int(tag[1]) for tag, _ in page.attributes if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    wide = [one for one in page.of("div") if one.get("class") == "scroll"]
    assert len(wide) == len(page.tables) + 1
    assert all(one["aria-label"] and one["tabindex"] == "0" for one in wide)
    html = (written / "index.html").read_text(encoding="utf-8")
    assert "@media print" in html and 'name="viewport"' in html


def _luminance(colour: str) -> float:
    """Of sRGB, as the Web Content Accessibility Guidelines define it."""
    digits = colour if len(colour) == 6 else "".join(2 * one for one in colour)
    part = np.array([int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)])
    linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(scheme: int, written: Path) -> None:
    """4.5 : 1, the guidelines' level AA."""
    html = (written / "index.html").read_text(encoding="utf-8")
    style = re.findall(r":root \{(.*?)\}", html, re.DOTALL)[scheme]
    shade = {name: _luminance(value) for name, value in re.findall(r"--([\w-]+): #(\w+)", style)}
    for ink, behind in [("ink", "paper"), ("soft", "paper"), ("edge", "paper"), ("ink", "box"),
                        ("ink", "bad-box")]:  # fmt: skip
        high, low = sorted((shade[ink], shade[behind]), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, behind)


@pytest.mark.parametrize("failed", [False, True])
def test_what_is_missing_is_called_failed_only_where_something_failed(
    failed: bool, record: dict[str, Any], tmp_path: Path
) -> None:
    failure = {"arm": "hmlp", "seed": 1, "what": "pretraining", "error": "it broke", "log": "a.log"}
    failures = [failure] if failed else []
    write_report({**record, "failures": failures, "missing": [["hmlp", 1]]}, {}, tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert ("## What failed" in text, "## What is not finished" in text) == (failed, not failed)
    assert "\n\nWithout all of their numbers: hmlp seed 1." in text
    assert ("it broke" in (tmp_path / "index.html").read_text(encoding="utf-8")) == failed
