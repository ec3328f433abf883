"""The wheel: what it holds, and that it trains the quickstart by its name where there is no clone."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

import pytest

from sf_core.cli.stack.local import Ports
from sf_core.process.import_path import NAMES
from sf_core.stages.preflight.stored_config import read_stored_config
from tests.bench import ROOT, stacks
from tests.bench.stacks.invariants import check_result

NAME = f"seamlessflow-{version('seamlessflow')}-py3-none-any.whl"
NEED_A_CLONE = {"emulated", "repair"}
EXTRAS = "s3,trackers,megatron,mcp,verifiers"


@dataclass
class Installed:
    """An environment that has the wheel, and a folder in which commands are called."""

    environment: Path
    folder: Path

    def call(self, program: str, *arguments: str) -> str:
        """Call a program of the environment, which must succeed; returns what it prints."""
        env = os.environ | {
            "PREFECT_HOME": str(self.folder.parent / "prefect"),
            "SF_CACHE_DIR": str(self.folder.parent / "cache"),
            "COLUMNS": "200",
        }
        for name in ("PYTHONPATH", "PREFECT_API_URL"):
            env.pop(name, None)
        command = [str(self.environment / "bin" / program), *arguments]
        return call(command, cwd=self.folder, env=env)

    def check(self) -> None:
        """Check the version, that what is imported comes from the wheel, and that the quickstart trains."""
        assert self.call("sf", "--version") == f"seamlessflow {version('seamlessflow')}\n"
        code = f"import {', '.join(NAMES)}\nfor one in ({', '.join(NAMES)}): print(one.__file__)"
        for file in self.call("python", "-c", code).splitlines():
            assert Path(file).is_relative_to(self.environment)
        short = {"train__iterations": 2, "policy__warmstart": "null", "evaluate__num_tasks": 8}
        smaller = {"rollout__groups_per_batch": 4, "rollout__group_size": 4}
        self.call("sf", "train", "quickstart", *stacks.quickstart.options(run_id="named", **short, **smaller))
        config = read_stored_config(str(self.folder / "runs" / "named"))
        assert config.train.iterations == 2
        check_result(config)


def call(command: list[str], *, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def build_wheel(folder: Path, *given: str) -> Path:
    """Build the wheel from a copy of the clone, in which no former build has left anything."""

    def generated(within: str, names: list[str]) -> list[str]:
        at_the_top = Path(within) == ROOT
        of_tools = {"build", "dist", "runs", "wandb"}
        return [
            name
            for name in names
            if name == "__pycache__" or (at_the_top and (name.startswith(".") or name in of_tools))
        ]

    shutil.copytree(ROOT, folder / "clone", symlinks=True, ignore=generated)
    call([sys.executable, "-m", "pip", "wheel", "--no-deps", *given, "."], cwd=folder / "clone")
    return folder / "clone" / NAME


def make_installed(folder: Path, *given: str) -> Installed:
    """A new environment without the wheel, and an empty folder."""
    call([sys.executable, "-m", "venv", *given, str(folder / "environment")])
    stacks.prefect_home.make_prefect_home(folder / "prefect")
    (folder / "empty").mkdir()
    return Installed(folder / "environment", folder / "empty")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"), "--no-build-isolation", "--no-index")


def test_it_holds_the_packages_and_what_needs_no_clone(wheel: Path) -> None:
    ours = {
        str(Path(folder, name).relative_to(ROOT))
        for package in NAMES
        for folder, _, names in os.walk(ROOT / package, followlinks=True)
        for name in names
        if not name.endswith(".pyc")
    }
    left_out = {f"sf_core/config/builtin/{name}.yaml" for name in NEED_A_CLONE}
    assert left_out < ours
    held = set(ZipFile(wheel).namelist())
    assert {name for name in held if ".dist-info/" not in name} == ours - left_out


def test_its_metadata_name_licence_and_authors_and_no_address(wheel: Path) -> None:
    folder = f"seamlessflow-{version('seamlessflow')}.dist-info"
    metadata = email.message_from_bytes(ZipFile(wheel).read(f"{folder}/METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "The SeamlessFlow authors"
    assert not {"Home-page", "Project-URL", "Download-URL", "Author-email"} & set(metadata)
    assert ZipFile(wheel).read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


# `make test-newest` trains after an install from nothing
@pytest.mark.nightly
def test_it_trains_the_quickstart_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    installed = make_installed(tmp_path, "--without-pip")
    python = str(installed.environment / "bin" / "python")
    call([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", str(wheel)])
    # the dependencies, but not the clone: .pth files of a folder that is named in one are not read. Last,
    # because pip would take the clone for the same version, installed already
    [packages] = installed.environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    installed.check()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_it_is_installed_and_trained_as_the_page_says(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The wheel is installed with all extras, and its dependencies come from the package index."""
    # a short name: sockets of `sf up` are below it, and pytest's own number may have three digits
    folder = tmp_path_factory.mktemp("page")
    wheel = build_wheel(folder)
    installed = make_installed(folder)
    shutil.copy(wheel, installed.folder)
    installed.call("pip", "install", "torch==2.13.0")
    installed.call("pip", "install", f"./{NAME}[{EXTRAS}]")
    installed.check()
    ports = Ports.free()
    chosen = (f"--{name}-port={getattr(ports, name)}" for name in ("prefect", "scheduler", "dataplane"))
    installed.call("sf", "up", "quickstart", *chosen)
    try:
        stacks.prefect_server.PrefectApi(ports.services.api).check_deployments()
    finally:
        installed.call("sf", "down")
