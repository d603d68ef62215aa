"""Which addresses are taken, and which are refused before anything is asked."""

import importlib.util

import pytest

from mimkit.data.patterns import expand_places, expand_shards
from mimkit.data.remote.urls import base_name, beside, parent, shown
from mimkit.errors import UserError

INSTALLED = ("https://h/a.tar", "http://h:8000/a.tar")


def test_brace_patterns_of_addresses() -> None:
    assert expand_places("https://h/x/train-{008..010}.tar") == [
        "https://h/x/train-008.tar",
        "https://h/x/train-009.tar",
        "https://h/x/train-010.tar",
    ]
    assert expand_places("http://{a,b}/{0,1}.tar?key=1") == [
        "http://a/0.tar?key=1",
        "http://a/1.tar?key=1",
        "http://b/0.tar?key=1",
        "http://b/1.tar?key=1",
    ]


def test_paths_and_addresses_stay_in_the_order_in_which_they_are_named(tmp_path) -> None:
    (tmp_path / "b.tar").touch()
    places = [INSTALLED[1], str(tmp_path), INSTALLED[0]]
    assert expand_places(places) == [INSTALLED[1], tmp_path / "b.tar", INSTALLED[0]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pipe:cat a.tar", "piped through programs"),
        ("pipe:curl -s https://h/a.tar", "piped through programs"),
        ("https://h/a.tar::pipe:true", "chains of protocols"),
        ("simplecache::https://h/a.tar", "chains of protocols"),
        ("zip://a.tar::https://h/a.zip", "chains of protocols"),
        ("a.tar::b.tar", "chains of protocols"),
        ("https://h/{a.tar,b.tar::pipe:true}", "chains of protocols"),
        ("https://h/a.tar{:,x}:pipe:true", "chains of protocols"),
        ("file:///etc/passwd", "leave file:// out: /etc/passwd"),
        ("local:///etc/passwd", "leave local:// out"),
        ("ftp://h/a.tar", r"fetched by http, https, s3, .* not by 'ftp'"),
        ("ssh://h/a.tar", "not by 'ssh'"),
        ("memory://a.tar", "not by 'memory'"),
        ("github://o:r@main/a.tar", "not by 'github'"),
        ("HTTPS://h/a.tar", "not by 'HTTPS'"),
        ("https://h/a b.tar", "no blanks"),
        ("https://h/a.tar\nHost: evil", "no blanks"),
        ("https://h\\@evil/a.tar", "no backslashes"),
        ("https:///a.tar", "incomplete; expected https://HOST/FOLDER"),
        ("https://h", "incomplete"),
        ("https://h/train/", "names no single tar"),
        ("https://h/train-*.tar", "names no single tar.*{000..012}"),
        ("https://h/train-[01].tar", "names no single tar"),
        ("https://h/train-{0..2.tar", "names no single tar|braces"),
        ("https://h/{0..99999999999}.tar", "more than 1000000"),
        ("{pipe:true,b.tar}", "'pipe:true', which is refused"),
        ("{https://h/a.tar,b.tar}", "do not exist"),
    ],
)
def test_what_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        expand_places(name)
    with pytest.raises(UserError, match=message):
        expand_places(["https://h/good.tar", name])


def test_an_address_named_twice() -> None:
    with pytest.raises(UserError, match=r"https://h/a\.tar are named more than once"):
        expand_places([INSTALLED[0], "https://h/{a,b}.tar"])


def test_local_tars_only(tmp_path) -> None:
    (tmp_path / "a.tar").touch()
    assert expand_shards(str(tmp_path)) == [tmp_path / "a.tar"]
    with pytest.raises(UserError, match=r"'https://h/a\.tar' is no local path"):
        expand_shards([str(tmp_path), INSTALLED[0]])


@pytest.mark.parametrize(
    ("url", "package", "install"),
    [
        ("https://h/a.tar", "aiohttp", "'mimkit[remote]'"),
        ("s3://bucket/a.tar", "s3fs", "'mimkit[remote]'"),
        ("gs://bucket/a.tar", "gcsfs", "gcsfs"),
        ("az://container/a.tar", "adlfs", "adlfs"),
        ("abfs://container/a.tar", "adlfs", "adlfs"),
        ("hf://datasets/o/n/a.tar", "huggingface_hub", "huggingface_hub"),
    ],
)
def test_a_package_that_is_missing_is_named(
    url: str, package: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != package or None)
    with pytest.raises(UserError) as caught:
        expand_places(url)
    assert f"needs the package {package}, which is not installed" in str(caught.value)
    assert str(caught.value).endswith(f"pip install {install}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    assert expand_places(url) == [url]


def test_passwords_and_signatures_are_not_shown() -> None:
    url = "https://user:secret@h:8000/x/a.tar?signature=secret"
    assert shown(url) == "https://h:8000/x/a.tar?..."
    assert (parent(url), base_name(url)) == ("https://user:secret@h:8000/x/", "a.tar")
    assert beside(url, "b") == "https://user:secret@h:8000/x/b?signature=secret"
