"""Instances of a data set in the format of SWE-bench, and the files of their repositories at a commit, from a
git folder or an archive.
"""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import orjson
import pyarrow.parquet as pq
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from storage.files import exists, join, read_bytes
from storage.json_files import load_json

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


_PATHS = re.compile(r"^(?:--- a|\+\+\+ b)/([^\t\n]+)", re.MULTILINE)


def _as_list(value: Any) -> Any:
    # JSON text in the public data set
    return load_json(value) if isinstance(value, str) else value


Tests = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[^:]+\.py::.+")], ...],
    BeforeValidator(_as_list),
]
"""Ids as pytest gives them, such as tests/test_a.py::test_b[1]."""


class Instance(BaseModel):
    """A row; further columns are ignored."""

    model_config = ConfigDict(frozen=True)

    instance_id: str = Field(min_length=1)
    repo: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    base_commit: str = Field(pattern=r"^[0-9a-f]{7,64}$")
    problem_statement: str
    patch: str
    test_patch: str
    fail_to_pass: Tests = Field(alias="FAIL_TO_PASS", min_length=1)
    pass_to_pass: Tests = Field(alias="PASS_TO_PASS")

    @property
    def tests(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.fail_to_pass + self.pass_to_pass))

    @property
    def test_files(self) -> list[str]:
        return sorted({test.partition("::")[0] for test in self.tests})


def paths_in(patch: str) -> set[str]:
    return set(_PATHS.findall(patch))


def read_instances(uri: str) -> list[Instance]:
    """All instances of a file of JSON lines or, by its name, Parquet. Raises ValueError with one sentence."""
    instances: dict[str, Instance] = {}
    for number, row in enumerate(_rows(uri), start=1):
        try:
            instance = Instance.model_validate(row)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"{uri}, row {number}: {where}: {first['msg']}") from None
        if instance.instance_id in instances:
            raise ValueError(
                f"{uri}, row {number}: another row already has the instance_id {instance.instance_id}"
            )
        instances[instance.instance_id] = instance
    if not instances:
        raise ValueError(f"{uri} has no instances")
    return list(instances.values())


def _rows(uri: str) -> list[Any]:
    try:
        content = read_bytes(uri)
        if uri.endswith(".parquet"):
            return pq.read_table(io.BytesIO(content)).to_pylist()
        return [orjson.loads(line) for line in content.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{uri} cannot be read: {error}") from None
