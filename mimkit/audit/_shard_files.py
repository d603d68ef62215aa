"""One tar: whether it is whole, what lies in it, and what is odd about that."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mimkit.audit._shard_findings import Finding, merge
from mimkit.audit._shard_records import (
    BAD_LABEL,
    Check,
    Image,
    compare_index,
    compare_manifest,
    rest,
)
from mimkit.data._members import image_member, label_of, no_image
from mimkit.data._tar_header import TarError
from mimkit.data.tar import File, Member, list_files, members_of, samples_of
from mimkit.errors import UserError

_LABELS = ("cls", "json")
# What other readers of tars load and run; we read no member but images and labels.
_RUNNABLE = ("pickle", "pkl", "pyd", "pt", "pth", "ckpt", "joblib", "py", "sh", "so", "exe", "dll")
_LEAVES_ITS_FOLDER = re.compile(r"^/|^[A-Za-z]:|\\|(^|/)\.\.(/|$)")


@dataclass(frozen=True, eq=False)
class ExaminedTar:
    """What was found in one tar.

    Attributes:
        images: in their order; none where the tar is damaged, whatever can still be read.
        checksum, index: what the comparison with manifest.json and with the index said.
    """

    path: Path
    num_bytes: int
    images: tuple[Image, ...] = ()
    checksum: Check = "none"
    index: Check = "none"
    findings: tuple[Finding, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether its headers are whole and it holds images."""
        return len(self.images) > 0


def examine_tar(path: Path, *, cache_dir: Path) -> ExaminedTar:
    """Reads every header and label, and every byte if the manifest has a SHA-256. Never raises
    for what is wrong with the tar: that is in `findings`."""
    num_bytes = path.stat().st_size
    try:
        files = list_files(path)
        samples = samples_of(members_of(files, path))
        images, bad_labels = _images(path, samples)
        if not images:
            raise no_image(path, samples)
        checksum, differences = compare_manifest(path, num_images=len(images))
    except TarError as error:
        damage = Finding(error.trouble, str(path), error.key, error.offset, rest(error, path))
        return ExaminedTar(path, num_bytes, findings=(damage,))
    except OSError as error:
        cause = f"cannot be read: {error.strerror or error}"
        trouble = Finding("unreadable", str(path), detail=cause)
        return ExaminedTar(path, num_bytes, findings=(trouble,))
    except UserError as error:
        nothing = Finding("no_image", str(path), detail=rest(error, path))
        return ExaminedTar(path, num_bytes, findings=(nothing,))
    index, disagreements = compare_index(path, images, cache_dir)
    odd = merge(_odd_files(path, files, samples))
    return ExaminedTar(
        path=path,
        num_bytes=num_bytes,
        images=tuple(images),
        checksum=checksum,
        index=index,
        findings=(*bad_labels, *differences, *disagreements, *odd),
    )


def _images(path: Path, samples: list[dict[str, Member]]) -> tuple[list[Image], list[Finding]]:
    """The images, and the labels that are none. Raises OSError."""
    images, problems = [], []
    with path.open("rb", buffering=0) as file:
        for sample in samples:
            member = image_member(sample)
            if member is None:
                continue
            label = BAD_LABEL
            try:
                label = label_of(sample, fd=file.fileno(), shard=path)
            except UserError as error:
                offset = sample["cls" if "cls" in sample else "json"].offset
                detail = rest(error, path)
                problems.append(Finding("bad_label", str(path), member.key, offset, detail))
            images.append(Image(member.key, member.extension, member.offset, member.size, label))
    return images, problems


def _odd_files(
    path: Path, files: Iterable[File], samples: Iterable[dict[str, Member]]
) -> Iterator[Finding]:
    """What training passes over, and what is there to harm other readers."""
    read = set[int]()  # offsets
    for sample in samples:
        if image := image_member(sample):
            read |= {image.offset, *(sample[name].offset for name in _LABELS if name in sample)}
        else:
            first, listed = next(iter(sample.values())), ", .".join(sorted(sample))
            read |= {member.offset for member in sample.values()}  # said once is enough
            detail = f"without an image it is no sample; it has .{listed}"
            yield Finding("sample_without_image", str(path), first.key, first.offset, detail)
    for file in files:
        for kind, detail in _oddities(file, is_read=file.offset in read):
            yield Finding(kind, str(path), file.name, file.offset, detail)


def _oddities(file: File, *, is_read: bool) -> Iterator[tuple[str, str]]:
    base = file.name.rpartition("/")[2].lower()
    extension = base.rpartition(".")[2]
    if _LEAVES_ITS_FOLDER.search(file.name):
        yield "suspicious_name", "a name that leads out of the folder in which it is unpacked"
    if extension in _RUNNABLE:
        detail = f".{extension} files can run code in programs that load them; mimkit does not"
        yield "suspicious_file", detail
    elif base.startswith(".") or extension == base:
        yield "unread_member", "hidden files and files without an extension are passed over"
    elif not is_read:
        detail = f".{extension} files that are neither image nor label of a sample are passed over"
        yield "unread_member", detail
