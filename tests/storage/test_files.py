import os
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage import files
from storage.run_directory import RunDirectory


def test_a_written_file_is_read_back_and_described(run_anywhere: RunDirectory) -> None:
    ref = files.write_atomic(run_anywhere.path("a", "b.bin"), b"hello")
    assert files.read_bytes(run_anywhere.path("a", "b.bin")) == b"hello"
    assert (ref.bytes, ref.sha256[:8]) == (5, "2cf24dba")


def test_writing_again_replaces_the_file(run_anywhere: RunDirectory) -> None:
    files.write_atomic(run_anywhere.path("x"), b"first")
    files.write_atomic(run_anywhere.path("x"), b"second")
    assert files.read_bytes(run_anywhere.path("x")) == b"second"


def test_create_keeps_what_is_there(run_anywhere: RunDirectory) -> None:
    files.write_atomic(run_anywhere.path("x"), b"first", create=True)
    with pytest.raises(FileExistsError):
        files.write_atomic(run_anywhere.path("x"), b"second", create=True)
    assert files.read_bytes(run_anywhere.path("x")) == b"first"


@pytest.mark.parametrize("run_anywhere", ["file", "s3"], indirect=True)
def test_of_many_creators_one_wins(run_anywhere: RunDirectory) -> None:
    def create(number: int) -> bool:
        try:
            files.write_atomic(run_anywhere.path("x"), str(number).encode(), create=True)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(32)))
    assert sum(won) == 1
    assert files.read_bytes(run_anywhere.path("x")) == str(won.index(True)).encode()


def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write_atomic(str(tmp_path / "x"), b"old")

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        files.write_atomic(str(tmp_path / "x"), b"new")
    assert os.listdir(tmp_path) == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"


def test_what_a_fence_refuses_does_not_appear(run_anywhere: RunDirectory) -> None:
    files.write_atomic(run_anywhere.path("x"), b"what counts")

    def refuse() -> None:
        raise RuntimeError("too late")

    with files.fence(refuse):
        with pytest.raises(RuntimeError, match="too late"):
            files.write_atomic(run_anywhere.path("x"), b"late")
        with pytest.raises(RuntimeError, match="too late"), files.writer(run_anywhere.path("x")) as file:
            file.write(b"late")
    assert files.read_bytes(run_anywhere.path("x")) == b"what counts"
    files.write_atomic(run_anywhere.path("x"), b"next")


def test_a_local_folder_is_what_is_there_now_and_copied_once() -> None:
    source = f"memory://{uuid.uuid4().hex}"
    files.write_atomic(f"{source}/config.json", b"old")
    first = files.local_folder(source)
    assert files.local_folder(source) == first
    files.remove_folder(source)
    files.write_atomic(f"{source}/config.json", b"new")
    assert (Path(first) / "config.json").read_bytes() == b"old"
    assert (Path(files.local_folder(source)) / "config.json").read_bytes() == b"new"
    files.remove_folder(source)


def test_listing_sees_files_written_since_and_neither_folders_nor_hidden_ones(
    run_anywhere: RunDirectory,
) -> None:
    assert files.list_files(run_anywhere.path("d")) == []
    files.write_atomic(run_anywhere.path("d", "b"), b"")
    assert files.list_files(run_anywhere.path("d")) == [run_anywhere.path("d", "b")]
    files.write_atomic(run_anywhere.path("d", "a"), b"")
    files.write_atomic(run_anywhere.path("d", ".a.123.tmp"), b"")
    files.write_atomic(run_anywhere.path("d", "folder", "c"), b"")
    assert files.list_files(run_anywhere.path("d")) == [
        run_anywhere.path("d", "a"),
        run_anywhere.path("d", "b"),
    ]


def test_a_link_is_listed_as_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"weights")
    (tmp_path / "d").mkdir()
    for name, leads_to in (("file", "blob"), ("folder", "."), ("nowhere", "none"), ("circle", "d/circle")):
        (tmp_path / "d" / name).symlink_to(tmp_path / leads_to)
    folder = str(tmp_path / "d")
    assert files.list_files(folder) == [f"{folder}/file"]
    assert files.list_folders(folder) == [f"{folder}/folder"]
    assert [ref.uri for ref in files.copy_folder(folder, str(tmp_path / "copy"))] == [f"{tmp_path}/copy/file"]
    assert not (tmp_path / "copy" / "file").is_symlink()


def test_removing_leaves_what_links_lead_to(tmp_path: Path) -> None:
    blob = tmp_path / "elsewhere" / "blob"
    files.write_atomic(str(blob), b"another run's")
    for parent in ("run", "other"):
        (tmp_path / parent).mkdir()
        (tmp_path / parent / "file").symlink_to(blob)
        (tmp_path / parent / "folder").symlink_to(blob.parent)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for gone in ("link", "other/file", "other/folder", "run"):
        files.remove_folder(str(tmp_path / gone))
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "other"}
    assert list((tmp_path / "other").iterdir()) == []
    assert blob.read_bytes() == b"another run's"


def test_what_lies_behind_a_link_lies_where_it_leads(run_anywhere: RunDirectory, tmp_path: Path) -> None:
    assert files.lies_in(run_anywhere.path("d", "x"), run_anywhere.uri)
    assert not files.lies_in(run_anywhere.uri + "-2/x", run_anywhere.uri)
    if files.is_local(run_anywhere.uri):
        (tmp_path / "elsewhere").mkdir()
        Path(run_anywhere.uri).mkdir()
        Path(run_anywhere.path("d")).symlink_to(tmp_path / "elsewhere")
        (tmp_path / "linked").symlink_to(run_anywhere.uri)
        assert not files.lies_in(run_anywhere.path("d", "x"), run_anywhere.uri)
        assert files.lies_in(str(tmp_path / "linked" / "x"), run_anywhere.uri)


def test_removing_twice_is_no_error(run_anywhere: RunDirectory) -> None:
    files.write_atomic(run_anywhere.path("x"), b"")
    files.remove(run_anywhere.path("x"))
    files.remove(run_anywhere.path("x"))
    assert not files.exists(run_anywhere.path("x"))


def test_a_folder_is_copied_without_what_is_excluded(run_anywhere: RunDirectory, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    files.copy_folder(str(tmp_path), run_anywhere.path("policy"), exclude=("*.safetensors",))
    assert files.list_files(run_anywhere.path("policy")) == [run_anywhere.path("policy", "config.json")]


def test_copying_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no files here"):
        files.copy_folder(str(tmp_path), str(tmp_path / "target"))


def test_local_paths_become_absolute_and_urls_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert files.absolute("runs/a") == str(tmp_path / "runs" / "a")
    assert files.absolute(f"file://{tmp_path}/a") == str(tmp_path / "a")
    assert files.absolute("memory://runs/a/") == "memory://runs/a"


def test_the_size_of_a_folder_is_known_while_files_are_written_into_it(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / str(number)).write_bytes(b"x")
    measured = threading.Event()

    def write() -> None:
        while not measured.is_set():
            files.write_atomic(str(tmp_path / "0"), b"x")

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        try:
            # a temporary file counts while it is there
            assert all(files.folder_bytes(str(tmp_path)) in (300, 301) for _ in range(20))
        finally:
            measured.set()
        writing.result()


def test_a_folder_goes_with_all_that_is_in_it(run_anywhere: RunDirectory) -> None:
    files.write_atomic(run_anywhere.path("d", "x"), b"12")
    files.write_atomic(run_anywhere.path("d", "deeper", ".y"), b"345")
    files.write_atomic(run_anywhere.path("e"), b"6")
    assert [files.folder_bytes(run_anywhere.path(name)) for name in ("d", "e", "none")] == [5, 1, 0]
    files.remove_folder(run_anywhere.path("d"))
    files.remove_folder(run_anywhere.path("d"))
    assert files.folder_bytes(run_anywhere.path("d")) == 0
    assert files.read_bytes(run_anywhere.path("e")) == b"6"
