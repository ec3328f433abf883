"""What a command requires of its environment, with real processes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from sf_core.process.environment_variables import reach_directly
from tests.bench import proxies
from tests.bench.refusals import check_sentence
from tests.bench.waits import patience

SF = str(Path(sys.executable).with_name("sf"))


def call(
    folder: Path, *command: str, files: int | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in the folder; `files` is the hard limit on open files."""

    def limit() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment,
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=patience(),
        encoding="utf-8",
    )


def check_refused(done: subprocess.CompletedProcess[str], *names: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    check_sentence(done.stderr.removeprefix("error: ").strip(), *names)


def test_a_folder_that_is_gone_is_no_place_for_a_command(tmp_path: Path) -> None:
    script = f"mkdir gone; cd gone; rmdir ../gone; exec {SF} settings"
    check_refused(call(tmp_path, "sh", "-c", script), "the current folder does not exist any more")


def test_what_is_elsewhere_is_still_asked_through_the_proxy(proxy: proxies.SilentProxy) -> None:
    os.environ["no_proxy"] = "example.org, 127.0.0.1"
    reach_directly("http://plane.internal:8700/x", None)
    assert os.environ["NO_PROXY"] == "example.org,127.0.0.1,localhost,::1,plane.internal"
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"]
    with pytest.raises(httpx.ConnectError):
        httpx.get("http://127.0.0.1:9")
    assert not proxy.was_asked()
    with pytest.raises(httpx.ReadTimeout):
        httpx.get("http://elsewhere.example", timeout=0.1)
    assert proxy.was_asked()


def test_where_no_proxy_is_named_nothing_is_excepted(proxy: proxies.SilentProxy) -> None:
    for name in proxies.VARIABLES:
        del os.environ[name]
    reach_directly("http://plane.internal:8700")
    assert os.environ["NO_PROXY"] == ""


def test_too_few_open_files_are_refused_before_anything_starts(tmp_path: Path) -> None:
    sentence = ("this process may open 256 files, but a stack needs 1024", "`ulimit -n 4096`")
    check_refused(call(tmp_path, SF, "up", files=256), *sentence)
    assert list(tmp_path.iterdir()) == []


def test_a_command_takes_as_many_open_files_as_it_may(tmp_path: Path) -> None:
    program = (
        "from sf_core.process.limits import check_open_files, raise_open_files\n"
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2048))\n"
        "raise_open_files()\n"
        "check_open_files()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    done = call(tmp_path, sys.executable, "-c", program, files=4096)
    assert done.stdout.strip() == "(2048, 2048)", done.stderr


@pytest.mark.parametrize(
    ("variable", "environment"),
    [("PREFECT_HOME", {}), ("SF_CACHE_DIR", {"PREFECT_HOME": "prefect"})],
)
def test_a_home_that_cannot_be_written_is_refused_before_anything_starts(
    tmp_path: Path, variable: str, environment: dict[str, str]
) -> None:
    inherited = ("PREFECT_HOME", "SF_CACHE_DIR", "XDG_CACHE_HOME", "PREFECT_API_URL")
    environment = dict.fromkeys(inherited, "") | {"HOME": "/dev/null"} | environment
    refused = call(tmp_path, SF, "up", **environment)
    check_refused(refused, "/dev/null/.", "cannot be written (Not a directory)", f"set {variable} to")
    assert not (tmp_path / ".stack").exists()
