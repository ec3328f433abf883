"""What killed writers left is found, and what live ones have is not."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pytest

from storage import files
from storage.run_directory import RunDirectory
from storage.tables.parquet import write_tables
from storage.unfinished import OLD_S, list_unfinished, list_uploads
from tests import bench
from tests.bench.ages import age
from tests.bench.commands import sf

MIB = 2**20

UPLOADER = """
import sys
from storage import files
with files.writer(sys.argv[1]) as file:
    for _ in range(110):
        file.write(bytes(2**20))
"""
"""Uploads a file in parts of 50, 50 and 10 MiB."""

LISTER = """
from storage.unfinished import list_uploads
print(len(list_uploads("s3://bucket/run")), "uploads")
"""

S3_KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


def test_a_temporary_file_without_a_writer_is_found(run_anywhere: RunDirectory) -> None:
    left = run_anywhere.path("weights", "v00001", f".model.safetensors.{'0' * 32}.tmp")
    files.write_atomic(left, b"half")
    files.write_atomic(run_anywhere.path("weights", "v00001", "model.safetensors"), b"whole")
    assert list_unfinished(run_anywhere.uri) == [], "its writer may not have locked it yet"
    local = files.is_local(run_anywhere.uri)
    if local:
        age(run_anywhere.uri)
    assert list_unfinished(run_anywhere.uri) == ([left] if local else [])
    assert list_unfinished(run_anywhere.path("none")) == []
    assert list_uploads(run_anywhere.uri) == []


def test_a_temporary_file_that_is_written_is_not_found(tmp_path: Path) -> None:
    with files.writer(str(tmp_path / "x")) as file:
        file.write(b"half")
        file.flush()
        age(tmp_path)
        assert len(os.listdir(tmp_path)) == 1 and list_unfinished(str(tmp_path)) == []
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("trajectories/iteration=4/x.parquet", "."),
        ("metrics/train/iteration=4.parquet", "metrics"),
        ("other/x.parquet", "other"),
    ],
)
def test_a_table_is_written_beside_its_own_folder_only(tmp_path: Path, name: str, beside: str) -> None:
    run = tmp_path / "iteration=3" / "runs" / "run"

    def rows() -> Iterator[pa.Table]:
        yield pa.table({"x": [1]})
        [temporary] = tmp_path.rglob("*.tmp")
        assert temporary.parent == run / beside
        yield pa.table({"x": [2]})

    write_tables(str(run / name), pa.schema({"x": pa.int64()}), rows())
    assert (run / name).is_file() and not [*tmp_path.rglob("*.tmp")]


def test_a_link_with_the_name_of_a_temporary_file_stays(tmp_path: Path) -> None:
    files.write_atomic(str(tmp_path / "x"), b"")
    (tmp_path / f".x.{'0' * 32}.tmp").symlink_to(tmp_path / "x")
    age(tmp_path)
    assert list_unfinished(str(tmp_path)) == []


def test_an_upload_whose_process_was_killed_is_found_and_aborted(s3_bucket: str) -> None:
    root = f"{s3_bucket}/{uuid.uuid4().hex}"
    run = RunDirectory(f"{root}/run-1")
    neighbour = RunDirectory(f"{root}/run-10")
    uri = f"{run.weights_dir(3)}/model.safetensors"
    with stalling_proxy(os.environ["AWS_ENDPOINT_URL"], 20 * MIB) as url:
        for target in (uri, f"{neighbour.weights_dir(3)}/model.safetensors"):
            uploader = subprocess.Popen(
                [sys.executable, "-c", UPLOADER, target], env={**os.environ, "AWS_ENDPOINT_URL": url}
            )
            folder = target.rpartition("/weights/")[0]
            bench.waits.wait_until(
                lambda folder=folder: [one.bytes for one in list_uploads(folder)] == [10 * MIB],
                "the last part",
            )
            uploader.kill()
            assert uploader.wait() == -signal.SIGKILL
    [upload] = list_uploads(run.uri)
    assert (upload.uri, upload.bytes) == (uri, 10 * MIB)
    # moto says of every upload that it began in 2010
    assert OLD_S == 24 * 3600 and list_uploads(run.uri, older_than_s=100 * 365 * OLD_S) == []

    bench.runs.configure(run)
    item = {
        "run": "run-1",
        "kind": "upload",
        "name": "weights/v00003/model.safetensors",
        "bytes": 10 * MIB,
    }
    assert json.loads(sf("gc", run.uri, "--json")[1]) == {"removed": False, "items": [item]}
    code, shown = sf("gc", run.uri, "--yes")
    assert code == 0 and "run-1 unfinished uploads of weights/v00003/model.safetensors 10.5 MB" in shown
    assert list_uploads(run.uri) == [] and len(list_uploads(neighbour.uri)) == 1
    upload.abort()
    assert not files.exists(uri)


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (403, "AccessDenied", "0 uploads"),
        (405, "MethodNotAllowed", "0 uploads"),
        (501, "NotImplemented", "0 uploads"),
        (404, "NoSuchBucket", "StorageError: s3://bucket/run: the bucket does not exist"),
    ],
)
def test_a_server_that_lists_no_uploads_has_none(status: int, code: str, told: str) -> None:
    with refusing_server(status, code) as url:
        # filesystems are kept per process with the server that they were made for
        listing = subprocess.run(
            [sys.executable, "-c", LISTER],
            env={**os.environ, **S3_KEYS, "AWS_ENDPOINT_URL": url},
            capture_output=True,
            encoding="utf-8",
        )
    assert told in listing.stdout + listing.stderr


@contextmanager
def refusing_server(status: int, code: str) -> Iterator[str]:
    """Address of a server with the API of S3 that refuses each request."""
    body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@contextmanager
def stalling_proxy(url: str, limit: int) -> Iterator[str]:
    """Address of a proxy that carries this many bytes of each connection to the server at `url`."""
    server = urlsplit(url)
    held: list[socket.socket] = []

    def carry(source: socket.socket, sink: socket.socket, left: float) -> None:
        try:
            while left > 0 and (data := source.recv(2**16)):
                sink.sendall(data)
                left -= len(data)
        except OSError:
            pass

    def accept() -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            onward = socket.create_connection((server.hostname, server.port))
            held.extend([client, onward])
            for pair in ((client, onward, limit), (onward, client, float("inf"))):
                threading.Thread(target=carry, args=pair, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            for one in held:
                one.close()
