"""Files of a repository at a commit, from a git folder or an archive."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from storage.files import exists, join, read_bytes

CACHED = 8
"""Commits kept in memory: the sessions of a group ask for the same one."""


def check_sources(repositories: str, commits: Iterable[tuple[str, str]]) -> None:
    """Raises ValueError with one sentence unless the place has these commits, as (repository, id)."""
    by_repo: dict[str, list[str]] = {}
    for repo, commit in commits:
        by_repo.setdefault(repo, []).append(commit)
    for repo, wanted_commits in by_repo.items():
        folder = _git_folder(repositories, repo)
        if folder is not None:
            if missing := _find_missing(folder, wanted_commits):
                raise ValueError(f"{folder} has no commit {missing[0]}")
            continue
        for commit in wanted_commits:
            if _archive(repositories, repo, commit) is None:
                names = f"{_slug(repo)} or {repo}", f"{_slug(repo)}-{commit}.tar.gz"
                raise ValueError(
                    f"{repositories} has neither a git folder {names[0]} nor an archive {names[1]}"
                )


@lru_cache(maxsize=CACHED)
def files_at(repositories: str, repo: str, commit: str) -> dict[str, bytes]:
    """Its files by their names, without links. Nobody may change what is returned."""
    folder = _git_folder(repositories, repo)
    if folder is not None:
        return _from_git(folder, commit)
    archive = _archive(repositories, repo, commit)
    if archive is None:
        raise ValueError(f"{repositories} no longer has the commit {commit} of {repo}")
    return _unpack(read_bytes(archive), repo.partition("/")[2])


def _slug(repo: str) -> str:
    return repo.replace("/", "__")


def _archive(repositories: str, repo: str, commit: str) -> str | None:
    names = (join(repositories, f"{name}-{commit}.tar.gz") for name in (_slug(repo), repo.partition("/")[2]))
    return next(filter(exists, names), None)


def _git_folder(repositories: str, repo: str) -> Path | None:
    for name in (_slug(repo), repo):
        for folder in (Path(repositories, name), Path(repositories, f"{name}.git")):
            if (folder / ".git").exists():
                return folder / ".git"
            if (folder / "HEAD").is_file():
                return folder
    return None


def _find_missing(folder: Path, commits: list[str]) -> list[str]:
    query = "".join(f"{commit}^{{commit}}\n" for commit in commits)
    reply = _git(folder, "cat-file", "--batch-check", stdin=query.encode()).decode()
    kinds = [line.split()[1] for line in reply.splitlines()]
    return [commit for commit, kind in zip(commits, kinds, strict=True) if kind != "commit"]


def _from_git(folder: Path, commit: str) -> dict[str, bytes]:
    # not `git archive`, which leaves out what .gitattributes says, tests most of all
    blobs: dict[str, bytes] = {}
    for entry in _git(folder, "ls-tree", "-r", "-z", "--full-tree", commit).split(b"\0")[:-1]:
        facts, _, name = entry.partition(b"\t")
        mode, _, blob = facts.split()
        if mode in (b"100644", b"100755"):
            path = name.decode(errors="surrogateescape")
            blobs[path] = blob
    query = b"".join(blob + b"\n" for blob in blobs.values())
    reply = io.BytesIO(_git(folder, "cat-file", "--batch", stdin=query))
    files: dict[str, bytes] = {}
    for path in blobs:
        size = int(reply.readline().split()[2])
        files[path] = reply.read(size)
        # the line end behind the content
        reply.read(1)
    return files


def _unpack(archive: bytes, name: str) -> dict[str, bytes]:
    files = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        for member in members:
            content = members.extractfile(member) if member.isreg() else None
            if content is not None:
                files[member.name.removeprefix("./")] = content.read()
    # those of GitHub have all in one folder NAME-COMMIT
    outer = f"{next(iter(files), '').partition('/')[0]}/"
    if outer.startswith(f"{name}-") and all(inner.startswith(outer) for inner in files):
        return {inner.removeprefix(outer): content for inner, content in files.items()}
    return files


def _git(folder: Path, *words: str, stdin: bytes = b"") -> bytes:
    ended = subprocess.run(["git", f"--git-dir={folder}", *words], input=stdin, capture_output=True)
    if ended.returncode:
        raise ValueError(f"git cannot read {folder}: {ended.stderr.decode(errors='replace').strip()}")
    return ended.stdout
