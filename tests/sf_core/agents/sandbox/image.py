"""An OCI image with a system and Python, made of this host's own Debian packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGES = ("python3", "bash", "dash", "coreutils", "grep", "sed", "procps", "util-linux")
MERGED = ("/bin", "/lib", "/lib64", "/sbin")
"""Links into /usr."""

WRAPPED = """#!/bin/sh
exec unshare --mount sh -c 'umount {unified} && exec {podman} "$@"' podman "$@"
"""


def podman_for_tests(folder: Path) -> Path:
    """A folder for PATH in which podman runs on this host too: crun refuses hosts that have control groups of
    both versions, so that it is not shown those of version 2."""
    unified = "/sys/fs/cgroup/unified"
    found = shutil.which("podman")
    places = folder / "bin"
    places.mkdir()
    if os.path.ismount(unified):
        (places / "podman").write_text(WRAPPED.format(unified=unified, podman=found), encoding="utf-8")
        (places / "podman").chmod(0o755)
    return places


@contextmanager
def tests_image(folder: Path) -> Iterator[str]:
    """Its name. It is removed afterwards. Raises CalledProcessError if podman does not take it."""
    name = f"localhost/sf-tests-{os.getpid()}"
    with tarfile.open(folder / "system.tar", "w") as archive:
        for link in MERGED:
            archive.add(link, recursive=False)
        for path in sorted(_files()):
            archive.add(path, recursive=False)
    _podman("import", "--quiet", str(folder / "system.tar"), name)
    try:
        yield name
    finally:
        _podman("rmi", "--force", name)


def _podman(*words: str) -> None:
    subprocess.run(["podman", *words], check=True, capture_output=True, encoding="utf-8")


def _files() -> set[Path]:
    """Files of the packages and of all that they need."""
    others = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
    without = [f"--no-{kind}" for kind in others]
    told = _told("apt-cache", "depends", "--recurse", "--installed", *without, *PACKAGES)
    names = [line for line in told.splitlines() if line[:1].isalnum()]
    paths = map(Path, _told("dpkg-query", "--listfiles", *names).splitlines())
    files = {path.parent.resolve() / path.name for path in paths if path.is_absolute()}
    # a link that its package has by another name
    files.add(Path("/usr/bin/sh"))
    return {path for path in files if str(path) not in MERGED and (path.is_symlink() or path.is_file())}


def _told(*words: str) -> str:
    # names that other packages provide are no packages, and said to be none
    return subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8").stdout
