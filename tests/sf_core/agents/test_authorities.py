"""Certificate authorities are read lazily only where all clients then trust the same ones as before."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import certifi
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.agents.authorities import equal_folder, read_authorities_lazily

CODE = (
    "import os; from sf_core.agents.authorities import read_authorities_lazily as read; read(); "
    "print(os.environ.get('SSL_CERT_FILE'), os.environ.get('SSL_CERT_DIR'))"
)


def pem(names: str, kind: str = "CERTIFICATE") -> str:
    """Certificates with these letters as content; nobody verifies them."""
    return "".join(f"# {name}\n-----BEGIN {kind}-----\n{name}A==\n-----END {kind}-----\n" for name in names)


class Host:
    """The files of a host: OpenSSL's bundle and folder, the bundle of certifi, and what a user has set."""

    def __init__(self, root: Path, bundle: str | None, folder: str | None, library: str, own: str) -> None:
        self.root = root
        self.paths = ssl.DefaultVerifyPaths(
            None, None, "SSL_CERT_FILE", str(root / "cert.pem"), "SSL_CERT_DIR", str(root / "certs")
        )
        if bundle is not None:
            (root / "cert.pem").write_text(pem(bundle), encoding="utf-8")
        for name, content in (("certs", folder), ("own-certs", own)):
            if content is not None:
                (root / name).mkdir()
                (root / name / "README").write_text(pem("Z"), encoding="utf-8")
                for number, letter in enumerate(content):
                    (root / name / f"{number:08x}.0").write_text(pem(letter), encoding="utf-8")
        (root / "certifi.pem").write_text(pem(library), encoding="utf-8")
        (root / "own.pem").write_text(pem(own), encoding="utf-8")

    def environ(self, file: str | None, folder: str | None) -> dict[str, str]:
        names = {"SSL_CERT_FILE": file, "SSL_CERT_DIR": folder}
        return {name: value and str(self.root / value) for name, value in names.items() if value is not None}

    def change(self, environ: dict[str, str]) -> dict[str, str]:
        folder = equal_folder(environ, self.paths, str(self.root / "certifi.pem"))
        kept = {name: value for name, value in environ.items() if name != "SSL_CERT_FILE"}
        return environ if folder is None else kept | {"SSL_CERT_DIR": folder}

    def trusted(self, client: str, environ: dict[str, str]) -> set[str]:
        """Names that a client trusts: httpx, httpx2 (the OpenAI SDK) or ssl itself."""
        file = environ.get("SSL_CERT_FILE")
        folder = environ.get("SSL_CERT_DIR")
        usual_file = self.paths.openssl_cafile
        usual_folder = self.paths.openssl_capath
        if client == "ssl":
            found = {usual_file if file is None else file, usual_folder if folder is None else folder}
        elif file:
            found = {file}
        elif folder:
            found = {folder}
        else:
            found = {str(self.root / "certifi.pem")} if client == "httpx" else {usual_file, usual_folder}
        return {name for path in found for name in read(Path(path))}


def read(path: Path) -> set[str]:
    if path.is_dir():
        return {name for file in path.glob("*.0") for name in read(file)}
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {line.removeprefix("# ") for line in lines if line.startswith("# ")}


NAMES = st.sampled_from(["", "A", "B", "AB", "BA", "ABC"])


@given(
    bundle=st.none() | NAMES,
    folder=st.none() | NAMES,
    library=NAMES,
    own=NAMES,
    file=st.sampled_from([None, "", "cert.pem", "own.pem", "certifi.pem", "missing.pem"]),
    chosen=st.sampled_from([None, "", "certs", "own-certs", "missing"]),
)
def test_every_client_trusts_the_same_certificates_as_before(
    bundle: str | None, folder: str | None, library: str, own: str, file: str | None, chosen: str | None
) -> None:
    with tempfile.TemporaryDirectory() as root:
        host = Host(Path(root), bundle, folder, library, own)
        environ = host.environ(file, chosen)
        changed = host.change(environ)
        for client in ("httpx", "httpx2", "ssl"):
            # an empty variable takes from `ssl` what is its default
            lost = host.trusted(client, environ) - host.trusted(client, changed)
            new = host.trusted(client, changed) - host.trusted(client, environ)
            assert not lost and (not new or "" in environ.values())


SAME = {"bundle": "AB", "folder": "BA", "library": "AB", "own": "C"}


@pytest.mark.parametrize(
    ("changes", "file", "chosen", "is_lazy"),
    [
        ({}, "cert.pem", None, True),
        ({}, "cert.pem", "certs", True),
        ({"library": "ABC"}, "cert.pem", None, True),
        ({"bundle": None}, "certifi.pem", None, True),
        ({}, None, None, True),
        ({"bundle": None}, None, None, True),
        # httpx trusts other certificates than the folder has
        ({"library": "ABC"}, None, None, False),
        ({"library": "A"}, None, None, False),
        # the file is the user's own
        ({}, "own.pem", None, False),
        ({}, "own.pem", "certs", False),
        ({}, "missing.pem", None, False),
        # the folder is the user's own
        ({}, "cert.pem", "own-certs", False),
        ({}, None, "own-certs", False),
        ({}, None, "certs", False),
        # the folder has more than the file, less, or nothing
        ({"folder": "ABC"}, "cert.pem", None, False),
        ({"folder": "A"}, "cert.pem", None, False),
        ({"folder": ""}, "cert.pem", None, False),
        ({"folder": None}, "cert.pem", None, False),
    ],
)
def test_a_folder_takes_the_place_of_the_systems_file_only(
    tmp_path: Path, changes: dict[str, str | None], file: str | None, chosen: str | None, is_lazy: bool
) -> None:
    parts: dict[str, str | None] = SAME | changes
    host = Host(tmp_path, parts["bundle"], parts["folder"], str(parts["library"]), str(parts["own"]))
    environ = host.environ(file, chosen)
    expected = {"SSL_CERT_DIR": str(tmp_path / "certs")} if is_lazy else environ
    assert host.change(environ) == expected


def test_certificates_with_trust_of_their_own_are_others(tmp_path: Path) -> None:
    host = Host(tmp_path, "AB", "AB", "AB", "")
    (tmp_path / "cert.pem").write_text(pem("AB") + pem("C", "TRUSTED CERTIFICATE"), encoding="utf-8")
    environ = host.environ("cert.pem", None)
    assert host.change(environ) == environ


@pytest.fixture
def system_bundle() -> str:
    """A file that trusts what the folder of this host does; skips the test without one."""
    paths = ssl.get_default_verify_paths()
    for file in (paths.openssl_cafile, "/etc/ssl/certs/ca-certificates.crt"):
        if equal_folder({"SSL_CERT_FILE": file}, paths, certifi.where()):
            return file
    pytest.skip("this host has no folder with the certificates of its file")


def variables(**environ: str) -> str:
    """The variables of a process that has started with these."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SSL_CERT_")}
    return subprocess.check_output(
        [sys.executable, "-c", CODE], env=clean | environ, text=True, encoding="utf-8"
    ).strip()


def test_a_process_of_this_host_reads_its_folder_instead_of_its_file(system_bundle: str) -> None:
    folder = ssl.get_default_verify_paths().openssl_capath
    assert variables(SSL_CERT_FILE=system_bundle) == f"None {folder}"
    assert variables(SSL_CERT_FILE=system_bundle, SSL_CERT_DIR=folder) == f"None {folder}"
    assert variables(SSL_CERT_DIR=folder) == f"None {folder}"


def test_the_users_own_file_stays(tmp_path: Path) -> None:
    own = tmp_path / "own.pem"
    own.write_text(
        Path(certifi.where()).read_text(encoding="utf-8").partition("-----END CERTIFICATE-----\n")[0],
        encoding="utf-8",
    )
    assert variables(SSL_CERT_FILE=str(own)) == f"{own} None"


def test_it_changes_nothing_the_second_time(
    monkeypatch: pytest.MonkeyPatch, system_bundle: str, snapshot: Callable[[], dict[str, str]]
) -> None:
    monkeypatch.setenv("SSL_CERT_DIR", "restored at the end also if it was not set")
    monkeypatch.delenv("SSL_CERT_DIR")
    monkeypatch.setenv("SSL_CERT_FILE", system_bundle)
    read_authorities_lazily()
    once = snapshot()
    read_authorities_lazily()
    assert snapshot() == once


@pytest.fixture
def snapshot() -> Callable[[], dict[str, str]]:
    return lambda: {name: value for name, value in os.environ.items() if name.startswith("SSL_CERT_")}
