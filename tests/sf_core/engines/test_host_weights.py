"""The copy of the weights on an engine's host: what it reads for a version, what it refuses and leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from sf_core.engines.host_weights import HostWeights
from sf_core.training.torch.publisher import Publisher
from sf_core.types import WeightsRef
from storage import files
from storage.errors import StorageError
from storage.run_directory import RunDirectory
from storage.tensors import shared_memory
from storage.tensors.weight_delta import save_delta
from storage.tensors.weights import load_weights, pack_weights, save_weights
from tests.bench.refusals import check_sentence
from tests.bench.waits import patience

HOLD = """
import sys
from sf_core.engines.host_weights import HostWeights
from sf_core.training.torch.publisher import Publisher
from sf_core.types import WeightsRef
from storage.tensors import shared_memory
shared_memory.SHARED_MEMORY_FOLDER = sys.argv[2]
host = HostWeights()
print(host.fetch(WeightsRef(1, sys.argv[1])), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Folders in place of shared memory and TMPDIR."""
    places = {name: tmp_path / name for name in ("memory", "temporary")}
    for place in places.values():
        place.mkdir()
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY_FOLDER", str(places["memory"]))
    monkeypatch.setattr("tempfile.tempdir", str(places["temporary"]))
    return places


@pytest.fixture
def host() -> Iterator[HostWeights]:
    host = HostWeights()
    yield host
    host.close()


@pytest.fixture
def run_with_deltas(tmp_path: Path) -> RunDirectory:
    """A run whose versions 1 to 4 are stored, each with a delta; in each, two elements of the first tensor
    are changed."""
    run = RunDirectory(str(tmp_path / "run"))
    base = None
    for version in range(1, 5):
        new = pack_weights(tensors(version), version)
        save_weights(run.weights_dir(version), tensors(version), version)
        if base is not None:
            assert save_delta(run.weights_dir(version), base, new, version)
        base = new
    return run


def tensors(version: int) -> dict[str, torch.Tensor]:
    changing = torch.arange(2000.0)
    changing[:version] = -1
    changing[7] = version
    return {"a": changing.bfloat16(), "b": torch.ones(30, 10).bfloat16(), "none": torch.zeros(0).bfloat16()}


def ref(run: RunDirectory, version: int) -> WeightsRef:
    return WeightsRef(version, run.weights_dir(version))


def file_of(run: RunDirectory, version: int, name: str) -> Path:
    return Path(run.weights_dir(version)) / f"{name}.safetensors"


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def holds(host: HostWeights, version: int) -> bool:
    found = load_weights(host.folder)
    expected = tensors(version)
    assert found.keys() == expected.keys()
    same = all(torch.equal(found[name], expected[name]) for name in expected)
    return same and host.version == version


def inode(host: HostWeights) -> int:
    """Changes when the file is another one."""
    return os.stat(f"{host.folder}/model.safetensors").st_ino


def test_a_newcomer_reads_all_and_then_what_changed_into_the_same_file(
    host: HostWeights, run_with_deltas: RunDirectory
) -> None:
    assert host.version is None
    assert host.fetch(ref(run_with_deltas, 1)) == host.folder
    assert holds(host, 1)
    first = inode(host)
    for version in (2, 3, 4):
        assert host.fetch(ref(run_with_deltas, version)) == host.folder
        assert holds(host, version) and inode(host) == first


def test_what_changed_is_taken_without_reading_the_rest(
    host: HostWeights, run_with_deltas: RunDirectory
) -> None:
    host.fetch(ref(run_with_deltas, 1))
    # the tensors of the next version are there but wrong, so they were not looked at
    damage(file_of(run_with_deltas, 2, "model"))
    host.fetch(ref(run_with_deltas, 2))
    assert holds(host, 2)


def test_one_that_lags_by_more_than_a_version_reads_all(
    host: HostWeights, run_with_deltas: RunDirectory
) -> None:
    host.fetch(ref(run_with_deltas, 1))
    first = inode(host)
    host.fetch(ref(run_with_deltas, 3))
    assert holds(host, 3) and inode(host) != first
    host.fetch(ref(run_with_deltas, 1))
    assert holds(host, 1), "a run may go back to an older version"


def test_a_version_that_is_here_is_not_read_again(host: HostWeights, run_with_deltas: RunDirectory) -> None:
    host.fetch(ref(run_with_deltas, 2))
    damage(file_of(run_with_deltas, 2, "model"))
    host.fetch(ref(run_with_deltas, 2))
    assert holds(host, 2)
    save_weights(run_with_deltas.weights_dir(9), tensors(2), 9)
    host.fetch(ref(run_with_deltas, 9))
    assert host.version == 9


@pytest.mark.parametrize("fault", ["corrupt", "truncated", "empty", "missing", "of other versions"])
def test_all_is_read_where_the_delta_is_of_no_use(
    host: HostWeights, run_with_deltas: RunDirectory, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    delta = file_of(run_with_deltas, 3, "delta")
    if fault == "corrupt":
        damage(delta)
    elif fault == "truncated":
        delta.write_bytes(delta.read_bytes()[:-1])
    elif fault == "empty":
        delta.write_bytes(b"")
    elif fault == "missing":
        delta.unlink()
    else:
        delta.write_bytes(file_of(run_with_deltas, 2, "delta").read_bytes())
    host.fetch(ref(run_with_deltas, 2))
    first = inode(host)
    host.fetch(ref(run_with_deltas, 3))
    assert holds(host, 3) and inode(host) != first
    told = [record.getMessage() for record in caplog.records]
    assert [str(delta) in text for text in told] == [True] * (fault != "missing")
    host.fetch(ref(run_with_deltas, 4))
    assert holds(host, 4) and inode(host) != first


def test_all_is_read_where_another_try_left_the_delta(
    host: HostWeights, run_with_deltas: RunDirectory
) -> None:
    host.fetch(ref(run_with_deltas, 2))
    save_weights(run_with_deltas.weights_dir(3), tensors(30), 3)
    host.fetch(ref(run_with_deltas, 3))
    assert torch.equal(load_weights(host.folder)["a"], tensors(30)["a"])


def test_all_is_read_where_an_engine_has_written_into_its_copy(
    host: HostWeights, run_with_deltas: RunDirectory
) -> None:
    host.fetch(ref(run_with_deltas, 1))
    with open(f"{host.folder}/model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    host.fetch(ref(run_with_deltas, 2))
    assert holds(host, 2)


@pytest.mark.parametrize("fault", ["corrupt", "truncated", "empty", "missing"])
@pytest.mark.parametrize("has_delta", [True, False])
def test_wrong_weights_are_refused_by_name_and_those_from_before_stay(
    host: HostWeights, run_with_deltas: RunDirectory, places: dict[str, Path], fault: str, has_delta: bool
) -> None:
    host.fetch(ref(run_with_deltas, 2))
    damage(file_of(run_with_deltas, 3, "delta"))
    if not has_delta:
        file_of(run_with_deltas, 3, "delta").unlink()
    full = file_of(run_with_deltas, 3, "model")
    if fault == "corrupt":
        damage(full)
    elif fault == "truncated":
        full.write_bytes(full.read_bytes()[:-1])
    elif fault == "empty":
        full.write_bytes(b"")
    else:
        full.unlink()
    with pytest.raises(ValueError) as refused:
        host.fetch(ref(run_with_deltas, 3))
    check_sentence(str(refused.value), str(full))
    assert holds(host, 2)
    assert len(list(places["memory"].iterdir())) == 1, "nothing of what was refused is left"
    host.fetch(ref(run_with_deltas, 4))
    assert holds(host, 4)


def test_a_header_that_names_more_than_there_is_is_refused(
    host: HostWeights, run_with_deltas: RunDirectory
) -> None:
    full = file_of(run_with_deltas, 1, "model")
    content = full.read_bytes()
    for wrong in (b"\xff" * 8 + content[8:], content.replace(b"[2000]", b"[20  ]"), content + b" "):
        full.write_bytes(wrong)
        with pytest.raises(ValueError) as refused:
            host.fetch(ref(run_with_deltas, 1))
        check_sentence(str(refused.value), str(full))
    assert host.version is None and not os.path.exists(f"{host.folder}/model.safetensors")


def test_a_start_folder_is_read_in_one_file_or_several_and_without_a_digest(
    host: HostWeights, run_with_deltas: RunDirectory
) -> None:
    halves = {"a": {"a": torch.ones(2)}, "b": {"b": torch.zeros(3)}}
    for name, half in halves.items():
        files.write_atomic(f"{run_with_deltas.start_dir}/{name}.safetensors", save(half, {"format": "pt"}))
    index = b'{"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}'
    files.write_atomic(f"{run_with_deltas.start_dir}/model.safetensors.index.json", index)
    host.fetch(WeightsRef(0, run_with_deltas.start_dir))
    assert sorted(load_weights(host.folder)) == ["a", "b"] and host.version == 0
    whole = run_with_deltas.path("whole")
    files.write_atomic(f"{whole}/model.safetensors", save(tensors(0), {"format": "pt"}))
    assert save_delta(
        run_with_deltas.weights_dir(1), pack_weights(tensors(0), 0), pack_weights(tensors(1), 1), 1
    )
    host.fetch(WeightsRef(0, whole))
    first = inode(host)
    host.fetch(ref(run_with_deltas, 1))
    assert holds(host, 1) and inode(host) == first


def test_weights_in_an_object_store_are_taken_in_the_same_way(host: HostWeights, s3_bucket: str) -> None:
    run = RunDirectory(f"{s3_bucket}/{uuid.uuid4().hex}/run")
    base, new = (pack_weights(tensors(version), version) for version in (1, 2))
    for version in (1, 2):
        save_weights(run.weights_dir(version), tensors(version), version)
    assert save_delta(run.weights_dir(2), base, new, 2)
    host.fetch(ref(run, 1))
    first = inode(host)
    host.fetch(ref(run, 2))
    assert holds(host, 2) and inode(host) == first
    files.write_atomic(f"{run.weights_dir(3)}/model.safetensors", b"no tensors")
    with pytest.raises(ValueError) as refused:
        host.fetch(ref(run, 3))
    check_sentence(str(refused.value), f"{run.weights_dir(3)}/model.safetensors")
    with pytest.raises(ValueError, match=r"v00009/model\.safetensors: no such file"):
        host.fetch(ref(run, 9))
    assert holds(host, 2)


@pytest.fixture
def remote() -> RunDirectory:
    """A run in an object store."""
    return RunDirectory(f"memory://{uuid.uuid4().hex}/run")


def damage_stored(run: RunDirectory, version: int) -> None:
    """Damage all tensors in the object store."""
    uri = f"{run.weights_dir(version)}/model.safetensors"
    content = files.read_bytes(uri)
    files.write_atomic(uri, content.replace(b"\x80\xbf", b"\x00\x00"))


def publish(publisher: Publisher, run: RunDirectory, version: int) -> None:
    publisher.save(run.weights_dir(version), tensors(version), version, run.weights_dir(version - 1))


def test_an_engine_on_the_trainers_host_takes_what_the_trainer_keeps_where_storage_is_remote(
    host: HostWeights, remote: RunDirectory, places: dict[str, Path]
) -> None:
    publisher = Publisher("bfloat16")
    for version in (1, 2, 3):
        publish(publisher, remote, version)
        # so that they are read nowhere else
        damage_stored(remote, version)
    host.fetch(ref(remote, 3))
    assert holds(host, 3)
    with pytest.raises(ValueError, match=r"v00001/model\.safetensors"):
        host.fetch(ref(remote, 1))
    # the next one is compared with what is shared
    publish(publisher, remote, 4)
    host.fetch(ref(remote, 4))
    assert holds(host, 4)
    host.close()
    del publisher
    assert not any(list(place.iterdir()) for place in places.values())


def test_what_the_trainer_shares_is_not_believed(
    host: HostWeights, remote: RunDirectory, places: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Publisher("bfloat16")
    for version, content in enumerate((b"", b"\0" * 4600, b"\0" * 9000), start=1):
        publish(publisher, remote, version)
        (shared,) = (file for file in places["memory"].glob("*/*") if len(file.name) == 64)
        shared.unlink()
        shared.write_bytes(content)
        host.close()
        host = HostWeights()
        host.fetch(ref(remote, version))
        assert holds(host, version)
        assert f"{shared}: " in caplog.messages[-1]
    host.close()


def test_a_trainer_whose_host_has_no_room_shares_nothing(
    host: HostWeights, remote: RunDirectory, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher("bfloat16")
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", lambda *_: os.write(-1, b""))
        publish(publisher, remote, 1)
    assert not list(places["memory"].iterdir())
    host.fetch(ref(remote, 1))
    publish(publisher, remote, 2)
    damage_stored(remote, 2)
    host.fetch(ref(remote, 2))
    assert holds(host, 2), "by the delta"


def test_tied_tensors_stay_tied(host: HostWeights, run_with_deltas: RunDirectory) -> None:
    shared = torch.randn(4, 2)
    save_weights(run_with_deltas.weights_dir(1), {"embed": shared, "head": shared}, 1)
    host.fetch(ref(run_with_deltas, 1))
    found = load_weights(host.folder)
    assert torch.equal(found["embed"], shared) and found["head"] is found["embed"]


def test_other_files_of_the_folder_stay(host: HostWeights, run_with_deltas: RunDirectory) -> None:
    config = Path(host.folder) / "config.json"
    config.write_text("{}", encoding="utf-8")
    for version in (1, 2, 4):
        host.fetch(ref(run_with_deltas, version))
    assert config.read_text(encoding="utf-8") == "{}"


def test_the_weights_are_in_shared_memory_if_it_has_room(
    run_with_deltas: RunDirectory, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(host: HostWeights) -> Path:
        return Path(os.path.realpath(f"{host.folder}/model.safetensors")).parents[1]

    host = HostWeights()
    host.fetch(ref(run_with_deltas, 1))
    assert place(host) == places["memory"]
    allocate = os.posix_fallocate

    def full(descriptor: int, offset: int, length: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(places["memory"]):
            raise OSError(28, "No space left on device")
        allocate(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    host.fetch(ref(run_with_deltas, 3))
    assert holds(host, 3) and place(host) == places["temporary"]
    assert not list(places["memory"].iterdir())
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY_FOLDER", str(places["temporary"] / "none"))
    host.fetch(ref(run_with_deltas, 1))
    assert holds(host, 1) and place(host) == places["temporary"]
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: os.write(-1, b""))
    with pytest.raises(StorageError, match=r"v00004/model\.safetensors: neither .* has 0 MiB of free space"):
        host.fetch(ref(run_with_deltas, 4))
    assert holds(host, 1) or host.version == 1
    host.close()
    assert not list(places["temporary"].iterdir())


def test_nothing_is_left_of_one_that_was_closed_or_forgotten(
    run_with_deltas: RunDirectory, places: dict[str, Path]
) -> None:
    for close in (True, False):
        host = HostWeights()
        host.fetch(ref(run_with_deltas, 1))
        host.fetch(ref(run_with_deltas, 3))
        assert all(list(place.iterdir()) for place in places.values())
        if close:
            host.close()
            host.close()
            with pytest.raises(RuntimeError, match="closed"):
                host.fetch(ref(run_with_deltas, 3))
        del host
        assert not any(list(place.iterdir()) for place in places.values())


def test_what_a_killed_process_left_goes_when_the_next_one_fetches(
    run_with_deltas: RunDirectory, places: dict[str, Path]
) -> None:
    command = [sys.executable, "-c", HOLD, run_with_deltas.weights_dir(1), str(places["memory"])]
    env = os.environ | {"TMPDIR": str(places["temporary"])}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as other:
        assert other.stdout is not None and other.stdout.readline()
        left = [folder for place in places.values() for folder in place.iterdir()]
        assert len(left) == 2
        other.kill()
        other.wait()
    for folder in left:
        os.utime(folder, (time.time() - 3600,) * 2)
    host = HostWeights()
    host.fetch(ref(run_with_deltas, 1))
    assert not any(folder.exists() for folder in left)
    host.close()


def test_one_that_is_closed_while_it_fetches_leaves_nothing(
    run_with_deltas: RunDirectory, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = threading.Event()
    go_on = threading.Event()
    allocate = os.posix_fallocate

    def slow(*arguments: int) -> None:
        allocate(*arguments)
        reading.set()
        go_on.wait(patience())

    monkeypatch.setattr(os, "posix_fallocate", slow)
    host = HostWeights()
    ended = []

    def fetch() -> None:
        try:
            host.fetch(ref(run_with_deltas, 1))
        except RuntimeError as error:
            ended.append(str(error))

    thread = threading.Thread(target=fetch)
    thread.start()
    assert reading.wait(patience())
    host.close()
    go_on.set()
    thread.join()
    assert ended == ["the copy of the weights on this host is closed"]
    assert not any(list(place.iterdir()) for place in places.values())


def test_fetches_of_several_threads_follow_one_another(
    host: HostWeights, run_with_deltas: RunDirectory
) -> None:
    versions = [1, 2, 3, 4] * 4
    threads = [
        threading.Thread(target=host.fetch, args=[ref(run_with_deltas, version)]) for version in versions
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert host.version is not None and holds(host, host.version)
