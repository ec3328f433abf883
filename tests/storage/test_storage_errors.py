"""A failing storage raises one sentence, whatever the kind of storage."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from s3fs import S3FileSystem

from storage import files
from storage.errors import StorageError
from storage.run_directory import RunDirectory
from tests.bench.s3_server import make_bucket, s3_server


@pytest.fixture
def other_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Sets AWS_* variables for a connection that is not shared with other tests."""

    def use(**variables: str) -> None:
        S3FileSystem.clear_instance_cache()
        for name, value in {
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
            **variables,
        }.items():
            monkeypatch.setenv(name, value)

    yield use
    S3FileSystem.clear_instance_cache()


def test_a_missing_bucket_is_no_missing_file(s3_bucket: str) -> None:
    for act in (
        lambda uri: files.read_bytes(uri),
        lambda uri: files.write_atomic(uri, b"x"),
        lambda uri: files.write_atomic(uri, b"x", create=True),
        lambda uri: files.list_files(uri),
        lambda uri: RunDirectory(uri).read_manifest(0, "rollout"),
    ):
        with pytest.raises(StorageError, match=r"s3://nothing-here/.*: the bucket does not exist; create it"):
            act("s3://nothing-here/run")


def test_denied_access_says_what_to_look_at(other_server: Callable[..., None]) -> None:
    # moto asks for known keys from the second action on: the first one makes the bucket
    with s3_server({"INITIAL_NO_AUTH_ACTION_COUNT": "1"}) as env:
        make_bucket(env)
        other_server(**env)
        for act in (
            lambda uri: files.read_bytes(uri),
            lambda uri: files.write_atomic(uri, b"x", create=True),
            lambda uri: files.exists(uri),
        ):
            with pytest.raises(StorageError, match=r"s3://bucket/x: access denied .*AWS_\* variables"):
                act("s3://bucket/x")


def test_a_server_that_is_not_there_is_named(other_server: Callable[..., None]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        other_server(AWS_ENDPOINT_URL=f"http://127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(StorageError, match=r"s3://bucket/x: the storage cannot be reached"):
            files.read_bytes("s3://bucket/x")


def test_a_server_that_does_not_answer_is_given_up(
    other_server: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(S3FileSystem, "read_timeout", 0.2)
    monkeypatch.setattr(S3FileSystem, "retries", 2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        other_server(AWS_ENDPOINT_URL=f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(StorageError, match=r"s3://bucket/x: the storage did not answer in time"):
            files.read_bytes("s3://bucket/x")


def test_a_folder_one_may_not_write_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(StorageError, match=r"file/x: the storage failed .*is a file, not a folder"):
        files.write_atomic(str(tmp_path / "file" / "x"), b"")


def test_a_storage_that_cannot_be_opened_says_why() -> None:
    with pytest.raises(StorageError, match="this storage needs a package that is not installed"):
        files.exists("adl://store/x")
    with pytest.raises(StorageError, match=r"foo://store/x: fsspec does not know this kind of storage"):
        files.exists("foo://store/x")


@pytest.mark.parametrize("name", ["s3://nothing-here/runs", "file"])
def test_a_folder_is_checked_before_it_is_used(s3_bucket: str, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(StorageError, match=rf"{name}: "):
        files.check_writable(name if "://" in name else str(tmp_path / name))
    for folder in (f"{s3_bucket}/new/folder", str(tmp_path / "new" / "folder")):
        files.check_writable(folder)
        assert files.list_files(folder) == []
