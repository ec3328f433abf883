"""Certificate authorities of TLS clients: read from a folder with hashed names as they are needed, which is
nearly free, instead of from a file of all, which takes 20 ms of CPU per client (docs/decisions/065)."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from pathlib import Path

import certifi

from storage.files import read_bytes

_HASHED = re.compile(r"[0-9a-f]{8}\.\d+")
"""Names by which OpenSSL finds the certificates of a folder."""

_CERTIFICATE = re.compile(rb"-----BEGIN ([A-Z0-9 ]*CERTIFICATE-----.+?)-----END ", re.DOTALL)


def read_authorities_lazily() -> None:
    """Set the variables of this process so, if all clients then trust the same certificates as before."""
    if folder := equal_folder(os.environ, ssl.get_default_verify_paths(), certifi.where()):
        os.environ.pop("SSL_CERT_FILE", None)
        os.environ["SSL_CERT_DIR"] = folder


def equal_folder(environ: Mapping[str, str], paths: ssl.DefaultVerifyPaths, bundle: str) -> str | None:
    """The folder that can take the place of SSL_CERT_FILE; None if clients would trust other certificates,
    as where the file is the user's own, or if nothing is to be changed.

    With neither variable, httpx trusts `bundle`, and others trust the file and the folder of OpenSSL."""
    file = environ.get("SSL_CERT_FILE")
    chosen = environ.get("SSL_CERT_DIR")
    if chosen and not file:
        return None
    folder = chosen or paths.openssl_capath
    trusted = _read_folder(folder)
    is_equal = trusted == _read_file(file or bundle)
    # without SSL_CERT_FILE, some clients add the file of OpenSSL
    return folder if trusted and is_equal and _read_file(paths.openssl_cafile) <= trusted else None


def _read_folder(folder: str) -> set[bytes]:
    try:
        hashed = [path for path in Path(folder).iterdir() if _HASHED.fullmatch(path.name)]
    except OSError:
        return set()
    return {certificate for path in hashed for certificate in _read_file(str(path))}


def _read_file(path: str) -> set[bytes]:
    try:
        return {b"".join(text.split()) for text in _CERTIFICATE.findall(read_bytes(path))}
    except OSError:
        return set()
