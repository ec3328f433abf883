"""The smoke tests on other versions than those of `.venv`, installed from nothing (docs/decisions/063).

`python -m tests.pythons newest` takes the newest Python of this machine that pyproject.toml names, and the
newest packages. `python -m tests.pythons lowest` takes the Python of `.venv`, and the lowest allowed version
of each package that pyproject.toml names. With `install` as second word it only installs, and with `test` it
only tests what is installed: `.ci/run` installs beside other tests.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PROJECT = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = [*chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())]
ENVIRONMENTS = Path(".venvs")
_CLASSIFIER = "Programming Language :: Python :: 3."
_UV = "uv==0.9.9"
_FIRST = ("~=", ">=", "==")


def main(which: str, only: str = "") -> int:
    python = sys.executable
    if which == "newest":
        version, python = newest_python()
        if version == sys.version_info[1]:
            print(f"newest: Python 3.{version} of .venv is the newest one here that pyproject.toml names")
            return 0
    began = time.monotonic()
    if only != "test":
        install(which, python)
    if only != "install":
        run_smoke_tests(ENVIRONMENTS / which)
        print(f"{which} tier: {time.monotonic() - began:.0f} s", flush=True)
    return 0


def install(which: str, python: str) -> None:
    began = time.monotonic()
    constraints = {}
    if which == "lowest":
        constraints["PIP_CONSTRAINT"] = str(pin_lowest(ENVIRONMENTS / "lowest.txt").absolute())
    folder = ENVIRONMENTS / which
    shutil.rmtree(folder, ignore_errors=True)
    run(["make", "--no-print-directory", "setup", f"PYTHON={python}", f"VENV={folder}"], **constraints)
    print(f"{which}: installed in {time.monotonic() - began:.0f} s, {count_mb(folder)} MB", flush=True)


def run_smoke_tests(folder: Path) -> None:
    train_quickstart(folder.absolute() / "bin" / "sf")
    run([str(folder / "bin" / "python"), "-m", "tests.tiers", "smoke"])
    # gigabytes; where a step failed, they stay for a closer look
    shutil.rmtree(folder)


def run(command: list[str], **env: str) -> None:
    """Run a command. Raises SystemExit with its exit code if it fails."""
    # with a path to a clone, pip would take the clone for installed
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if code := subprocess.run(command, env=inherited | env).returncode:
        sys.exit(code)


def newest_python() -> tuple[int, str]:
    """Second number of the newest installed Python that pyproject.toml names, and a path of it."""
    for version in sorted(named_pythons(), reverse=True):
        for path in places_of(version):
            if makes_environments(path, version):
                return version, path
    return sys.version_info[1], sys.executable


def named_pythons() -> list[int]:
    """Second numbers of the Pythons that pyproject.toml names."""
    return [
        int(one.removeprefix(_CLASSIFIER)) for one in PROJECT["classifiers"] if one.startswith(_CLASSIFIER)
    ]


def places_of(version: int) -> Iterator[str]:
    name = f"python3.{version}"
    if found := shutil.which(name):
        yield found
    # pyenv has those in its folder that it does not put on the path
    of_pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    yield from sorted(map(str, of_pyenv.glob(f"3.{version}.*/bin/{name}")))


def makes_environments(path: str, version: int) -> bool:
    """Whether this is a Python 3 of this version with venv and pip; names of pyenv may lead nowhere."""
    code = f"import sys, ensurepip, venv; sys.exit(sys.version_info[:2] != (3, {version}))"
    return subprocess.run([path, "-c", code], stderr=subprocess.DEVNULL).returncode == 0


def pin_lowest(target: Path) -> Path:
    """File of constraints: the lowest allowed version of each package that pyproject.toml names, and fitting
    versions of all other packages. Raises SystemExit if another package needs more than the lowest allowed
    version, or if any version is allowed: nothing would ever test that bound."""
    tool = ENVIRONMENTS / "uv"
    run([sys.executable, "-m", "venv", "--clear", str(tool)])
    run([str(tool / "bin" / "python"), "-m", "pip", "install", "--quiet", _UV])
    asked = [str(tool / "bin" / "uv"), "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    asked += ["--python", sys.executable, "--resolution", "lowest-direct", "--extra", "dev"]
    # else uv takes a newer version of ours where the newest version of another package asks for it
    bounds = target.with_suffix(".bounds.txt")
    bounds.write_text(
        "".join(f"{name}=={first}\n" for name, first in lowest_allowed(REQUIREMENTS)), encoding="utf-8"
    )
    asked += ["--constraint", str(bounds)]
    # uv does not read pip's settings
    certificates = {"SSL_CERT_FILE": os.environ["PIP_CERT"]} if "PIP_CERT" in os.environ else {}
    run([*asked, "pyproject.toml", "--output-file", str(target)], **certificates)
    if untested := list(untested_bounds(REQUIREMENTS, target.read_text(encoding="utf-8"))):
        sys.exit("\n".join(untested))
    return target


def lowest_allowed(requirements: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Name and lowest allowed version of each package for which requirements name one."""
    for requirement in map(Requirement, requirements):
        for one in requirement.specifier:
            if one.operator in _FIRST:
                yield canonicalize_name(requirement.name), one.version


def untested_bounds(requirements: Iterable[str], pins: str) -> Iterator[str]:
    """A sentence for each requirement that allows a lower version than these pins have, or any version."""
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", pins, re.MULTILINE))
    for requirement in map(Requirement, requirements):
        if (name := canonicalize_name(requirement.name)) == PROJECT["name"]:
            continue
        lowest = [Version(one.version) for one in requirement.specifier if one.operator in _FIRST]
        if lowest != [Version(pinned[name])]:
            yield f"pyproject.toml: nothing tests {requirement}; what is tested is {name}>={pinned[name]}"


def train_quickstart(sf: Path) -> None:
    """Train three iterations of the quickstart, as its user does."""
    with tempfile.TemporaryDirectory() as folder:
        # the short name of a folder: sockets are below it
        own = {"PREFECT_HOME": f"{folder}/prefect", "SF_CACHE_DIR": f"{folder}/cache"}
        settings = ["train.iterations=3", f"storage.root={folder}/runs"]
        run([str(sf), "train", "quickstart", *chain(*(("--set", one) for one in settings))], **own)


def count_mb(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*")) // 1_000_000


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
