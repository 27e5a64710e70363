"""URLs: what is one, how its parts are joined, and which are refused before anything prints them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.core.findings.errors import InputError
from shardwright.storage.url import Url, parsed_place

PASSWORD = (
    ": this URL has a password or a key, which would be shown and stored. Give it where the store's client reads it: in the "
    "environment, or in fsspec's configuration file."
)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("run", Path("run")),
        ("/data/run/", Path("/data/run")),
        ("file:///data/run", Path("/data/run")),
        ("s3://bucket", Url("s3://bucket")),
        ("s3://bucket/run///", Url("s3://bucket/run")),
        ("S3://Bucket/a run", Url("s3://Bucket/a run")),
        ("s3://bucket/a@b:c", Url("s3://bucket/a@b:c")),
        ("s3://arn:aws:s3:us-west-2:1:accesspoint/a/run@2", Url("s3://arn:aws:s3:us-west-2:1:accesspoint/a/run@2")),
        ("hdfs://host:8020/ann@home", Url("hdfs://host:8020/ann@home")),
        ("sftp://ann@host/run", Url("sftp://ann@host/run")),
        ("abfs://container@account.dfs.core.windows.net/run", Url("abfs://container@account.dfs.core.windows.net/run")),
        ("memory://run", Url("memory://run")),
        ("a:b/c", Path("a:b/c")),
    ],
)
def test_a_place(text: str, place: object) -> None:
    assert parsed_place(text) == place
    assert parsed_place(parsed_place(text)) == place


def test_parts_are_those_of_a_path() -> None:
    url, path = Url("s3://bucket/run"), Path("bucket/run")
    for name in ("checkpoints", "step-00000010", "manifest.json"):
        url, path = url / name, path / name
        assert (url.name, str(url), url.parent.name) == (path.name, f"s3://{path}", path.parent.name)
    assert Url("s3://bucket").parent == Url("s3://bucket")
    assert Url("s3://bucket/run").parent == Url("s3://bucket")
    assert sorted([Url("s3://b/2"), Url("s3://b/1")]) == [Url("s3://b/1"), Url("s3://b/2")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s3://", "s3://: needed a bucket and a folder, as s3://bucket/folder."),
        ("s3:///run", "s3:///run: needed a bucket and a folder, as s3://bucket/folder."),
        ("s3://bucket//run", "s3://bucket//run: needed a bucket and a folder, as s3://bucket/folder."),
        ("file://run", "file://run: the path of a file URL begins with a slash, as file:///data/run."),
        (
            "s3://bucket/run/../a",
            "s3://bucket/run/../a: in a store '.' and '..' are no folders. Give the folder itself.",
        ),
        ("s3://bucket/./run", "s3://bucket/./run: in a store '.' and '..' are no folders. Give the folder itself."),
        ("s3://bucket/a::file:///etc", "s3://bucket/a::file:///etc: '::' joins several URLs, and one is needed here."),
        ("s3://bucket/a\x1b[2Jb", "'s3://bucket/a\\x1b[2Jb': a URL has no control characters."),
        (
            "simplecache::s3://key:secret@bucket/run",
            "'simplecache::s3' is not the scheme of a URL. Give one as s3://bucket/folder, or a local path.",
        ),
        ("ftp://ann:secret@host/run", f"ftp://...@host/run{PASSWORD}"),
        ("s3://key:sec/secret+/ret@bucket/run", f"s3://...@bucket/run{PASSWORD}"),
        ("S3://key:secret@bucket/run?sig=secret", f"s3://...@bucket/run{PASSWORD}"),
        ("s3://key:123/secret@bucket/run", f"s3://...@bucket/run{PASSWORD}"),
        ("gs://secret@bucket?token=secret", f"gs://...@bucket{PASSWORD}"),
        (
            "https://host/run?sig=secret",
            "https://host/run: this URL has more after '?', which would be shown and stored. Give options of the store in the "
            "environment, or in fsspec's configuration file.",
        ),
        (
            str(Path("s3://bucket/run")),
            "s3:/...: a URL has two slashes after its scheme. In Python give it as a text, not as a Path.",
        ),
    ],
)
def test_a_refused_place(text: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        parsed_place(text)
    assert str(raised.value) == message
    assert "secret" not in str(raised.value)
