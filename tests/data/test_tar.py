"""A tar is read whole or refused."""

import contextlib
import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mimkit.data.tar import Member, scan_tar
from mimkit.errors import UserError

NAMES = ["a/x.jpg", "a/x.cls", "a/y.jpg", "b/" + "long" * 40 + ".jpg", "b/ü.png"]


def pack(
    path: Path, names: list[str], *, kind: bytes = tarfile.REGTYPE, format: int = tarfile.PAX_FORMAT
) -> Path:
    with tarfile.open(path, "w", format=format) as tar:
        for number, name in enumerate(names):
            member = tarfile.TarInfo(name)
            member.type = kind
            content = bytes([number + 1]) * (300 * number + 1) if kind == tarfile.REGTYPE else b""
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_members_are_where_the_scan_says(tmp_path: Path, format: int) -> None:
    path = pack(tmp_path / "a.tar", NAMES, format=format)
    content = path.read_bytes()
    members = scan_tar(path)
    assert [f"{m.key}.{m.extension}" for m in members] == NAMES
    for number, member in enumerate(members):
        data = content[member.offset : member.offset + member.size]
        assert data == bytes([number + 1]) * (300 * number + 1)


def test_ustar_prefix(tmp_path: Path) -> None:
    name = "d" * 90 + "/" + "e" * 60 + ".jpg"
    assert (
        scan_tar(pack(tmp_path / "a.tar", [name], format=tarfile.USTAR_FORMAT))[0].key + (".jpg")
        == name
    )


def test_keys_end_at_the_first_dot_and_what_is_no_sample_is_passed_over(tmp_path: Path) -> None:
    names = ["./v1.0/a.seg.PNG", ".hidden", "README", "v1.0/b.jpg"]
    members = [m[:2] for m in scan_tar(pack(tmp_path / "a.tar", names))]
    assert members == [("v1.0/a", "seg.png"), ("v1.0/b", "jpg")]


def test_directories_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.jpg").write_bytes(b"x")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "folder", "folder")
    assert [m.key for m in scan_tar(tmp_path / "a.tar")] == ["folder/a"]


@pytest.mark.parametrize(
    ("kind", "what"),
    [(tarfile.SYMTYPE, "symbolic link"), (tarfile.LNKTYPE, "hard link"), (b"3", "device")],
)
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes, what: str) -> None:
    with pytest.raises(UserError, match=what):
        scan_tar(pack(tmp_path / "a.tar", ["a.jpg"], kind=kind))


def test_large_member_sizes_in_base_256(tmp_path: Path) -> None:
    path = pack(tmp_path / "a.tar", ["a.jpg"])
    header = bytearray(path.read_bytes())
    header[124:136] = b"\x80" + (1).to_bytes(11, "big")
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + sum(header[156:512]) + 256)
    path.write_bytes(header)
    assert scan_tar(path) == [Member("a", "jpg", 512, 1)]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.jpg", "a.jpg"], "'a.jpg' twice"),
        (["a.JPG", "a.jpg"], "'a.jpg' twice"),
        (["a.jpg", "b.jpg", "a.cls"], "sample 'a' do not lie together"),
    ],
)
def test_doubles_are_refused(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        scan_tar(pack(tmp_path / "a.tar", names))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"\x1f\x8b\x08" + bytes(600), "gunzip -k "),
        (b"<html>" + bytes(600), "not a tar"),
        (b"short", "cut short"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(UserError, match=message):
        scan_tar(tmp_path / "a.tar")


def test_two_tars_in_one_and_reserved_space_are_refused(tmp_path: Path) -> None:
    content = pack(tmp_path / "a.tar", NAMES).read_bytes()
    (tmp_path / "b.tar").write_bytes(content + content)
    with pytest.raises(UserError, match="after the end"):
        scan_tar(tmp_path / "b.tar")
    (tmp_path / "c.tar").write_bytes(content + bytes(2 << 20))
    with pytest.raises(UserError, match="not fully downloaded"):
        scan_tar(tmp_path / "c.tar")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(tmp_path_factory.mktemp("tar") / "whole.tar", NAMES)


reuse = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200
)


@reuse
@given(data=st.data())
def test_every_cut_is_noticed(whole: Path, data: st.DataObject) -> None:
    content, members = whole.read_bytes(), scan_tar(whole)
    end = members[-1].offset + -(-members[-1].size // 512) * 512 + 1024  # with both end blocks
    cut = whole.with_name("cut.tar")
    cut.write_bytes(content[: data.draw(st.integers(0, end - 1))])
    with pytest.raises(UserError):
        scan_tar(cut)


@reuse
@given(data=st.data())
def test_every_flipped_bit_of_a_header_is_noticed_or_harmless(
    whole: Path, data: st.DataObject
) -> None:
    content, members = bytearray(whole.read_bytes()), scan_tar(whole)
    header = data.draw(st.sampled_from([member.offset - 512 for member in members]))
    bit = data.draw(st.integers(0, 512 * 8 - 1))
    content[header + bit // 8] ^= 1 << bit % 8
    flipped = whole.with_name("flipped.tar")
    flipped.write_bytes(content)
    in_checksum = bit // 8 in range(148, 156)  # a blank for a leading 0 is the same number
    if in_checksum:
        with contextlib.suppress(UserError):
            assert scan_tar(flipped) == members
    else:
        with pytest.raises(UserError):
            scan_tar(flipped)


@reuse
@given(data=st.data())
def test_every_hole_over_a_header_is_noticed(whole: Path, data: st.DataObject) -> None:
    content, members = bytearray(whole.read_bytes()), scan_tar(whole)
    header = data.draw(st.sampled_from([member.offset - 512 for member in members]))
    blocks = data.draw(st.integers(1, 3))
    content[header : header + 512 * blocks] = bytes(512 * blocks)
    if not any(content[header:]):
        return  # nothing but the end is left: only a manifest can tell
    holed = whole.with_name("holed.tar")
    holed.write_bytes(content)
    with pytest.raises(UserError):
        scan_tar(holed)


@pytest.mark.parametrize(
    "record", [b"0129" + b"9" * 5000 + b" path=a\n", b"5012 size=" + b"9" * 5001 + b"\n",
               b"11 size=-5\n"],
)  # fmt: skip
def test_numbers_that_no_file_has_are_damage(record: bytes, tmp_path: Path) -> None:
    """Python refuses to read thousands of digits, with an error that is nobody's."""
    path = tmp_path / "t.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        header = tarfile.TarInfo("x")
        header.type, header.size = tarfile.XHDTYPE, len(record)
        tar.addfile(header, io.BytesIO(record))
    with pytest.raises(UserError, match=r"damaged: a pax .* at byte 0|damaged: a pax"):
        scan_tar(path)
