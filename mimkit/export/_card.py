"""The model card of an export: Markdown with HuggingFace's metadata in front."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import yaml

from mimkit.export import ExportReport

_FEATURES = """\
Features of natural images, frozen (kNN, linear or attentive probes, retrieval) or as a start for
finetuning. """
_CARE = """
Nothing here was evaluated for safety-critical use, for people's identities, or on images unlike
those named here."""
PRETRAINED = f"""{_FEATURES}It was pretrained without labels by predicting what masked patches held:
it names no classes, and its features carry whatever the pretraining images favour.{_CARE}"""
IMPORTED = f"""{_FEATURES}These are weights of somebody else's under other names: what they were
trained on, and what their licence allows, is for their authors to say.{_CARE}"""

CLASSIFIES = f"""The classes named below, of images like those it was finetuned on; it gives one of
them for any image, and its confidence says little about images of another kind.{_CARE}"""


@dataclass(frozen=True)
class CardFacts:
    """What the run says; sections are tables, title -> row -> value."""

    name: str
    licence: str  # an identifier of HuggingFace's, such as apache-2.0
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: tuple[int, int]
    sections: Mapping[str, Mapping[str, object]]
    intended: str = PRETRAINED
    task: str = "image-feature-extraction"  # HuggingFace's pipeline_tag


def model_card(facts: CardFacts, report: ExportReport) -> str:
    """The text; tables without rows are said to be empty, so that nothing missing looks fine."""
    head = {
        "license": facts.licence,
        "library_name": report.library,
        "pipeline_tag": facts.task,
        "tags": ["masked-image-modeling", "beit", "vision-transformer", "mimkit"],
    }
    height, width = facts.image_size
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# {facts.name}",
        f"{report.architecture}, {report.parameters / 1e6:.2f} M parameters, for images of "
        f"{height}x{width} pixels; written by mimkit.",
        f"## Use\n\n```python\n{report.usage}\n```\n\n`images` are (B, 3, H, W): pixels in [0, 1], "
        f"minus mean {list(facts.mean)}, divided by std {list(facts.std)}, a channel each.",
        f"## Intended use\n\n{facts.intended}",
        *(_section(title, rows) for title, rows in facts.sections.items()),
        "\n".join(_proof(report)),
        _section("Files", {name: f"sha256 `{sha}`" for name, sha in report.files.items()}),
    ]
    return "\n\n".join(parts) + "\n"


def _section(title: str, rows: Mapping[str, object]) -> str:
    if not rows:
        return f"## {title}\n\nNone on record."
    lines = [f"| {name} | {_said(value)} |" for name, value in rows.items()]
    return "\n".join([f"## {title}\n", "| | |", "|---|---|", *lines])


def _said(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _proof(report: ExportReport) -> Iterator[str]:
    yield "## Proof\n"
    yield (
        "The export was loaded back by its own library and fed the same images as the trained "
        f"encoder; no output may differ by more than {report.tolerance:g} in float32 (logits "
        "beyond one: in units of the largest).\n"
    )
    yield "| pixels | images | largest difference | mean difference |"
    yield "|---|---|---|---|"
    for found in report.comparisons:
        yield (
            f"| {found.height}x{found.width} | {found.images} | {found.max_difference:.1e} | "
            f"{found.mean_difference:.1e} |"
        )
    if report.bf16_difference is not None:
        yield f"\nIn bfloat16 its outputs differ by at most {report.bf16_difference:.2g}."
    source, loaded, threads = report.latency
    yield (
        f"\nOne image on {threads} CPU thread{'s' if threads > 1 else ''}: {loaded:.1f} ms, "
        f"in mimkit (torch) {source:.1f} ms."
    )
