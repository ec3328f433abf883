from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sf_core.dataplane.operator_key import account_key, key_file, operator_key

LOOPBACK = "http://127.0.0.1:8700"


@pytest.fixture(autouse=True)
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of configuration of an account that has no key yet."""
    monkeypatch.delenv("SF_DATAPLANE_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "seamlessflow"


def test_the_account_has_one_key_in_a_file_of_its_own(account: Path) -> None:
    assert operator_key(LOOPBACK) is None
    key = account_key()
    assert len(key) == 32
    assert (key_file(), key_file().stat().st_mode & 0o777) == (account / "dataplane.key", 0o600)
    assert list(account.iterdir()) == [key_file()]
    assert account_key() == key == operator_key(LOOPBACK) == operator_key("http://localhost:1/")


@pytest.mark.parametrize("url", ["http://10.0.0.1:8700", "https://plane.example.org", "http://evil.test", ""])
def test_the_key_of_the_account_stays_on_this_machine(url: str) -> None:
    account_key()
    assert operator_key(url) is None


def test_the_users_key_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    account_key()
    monkeypatch.setenv("SF_DATAPLANE_KEY", "chosen")
    assert operator_key(LOOPBACK) == operator_key("https://plane.example.org") == "chosen"


def test_a_folder_that_cannot_be_one_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/dev/null/x")
    assert operator_key(LOOPBACK) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_key_that_others_can_read_is_refused(mode: int) -> None:
    account_key()
    key_file().chmod(mode)
    with pytest.raises(ValueError, match=r"dataplane\.key, .*, is open to other users: remove the file"):
        account_key()


def test_an_empty_key_is_refused() -> None:
    account_key()
    key_file().write_text("\n", encoding="utf-8")
    assert operator_key(LOOPBACK) is None
    with pytest.raises(ValueError, match=r"is empty: remove the file"):
        account_key()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(account: Path) -> None:
    account.parent.mkdir(mode=0o500)
    with pytest.raises(OSError, match=r"cannot be written .*: set SF_DATAPLANE_KEY to a key of your own"):
        account_key()


def test_processes_that_start_together_have_the_same_key() -> None:
    command = [
        sys.executable,
        "-c",
        "from sf_core.dataplane.operator_key import account_key; print(account_key())",
    ]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") for _ in range(4)]
    assert len({process.communicate()[0] for process in started}) == 1


def test_the_command_prints_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "sf_core", "key"]
    printed = subprocess.run(command, capture_output=True, check=True, encoding="utf-8").stdout
    assert printed == f"{account_key()}\n"
    monkeypatch.setenv("SF_DATAPLANE_KEY", "chosen")
    assert subprocess.run(command, capture_output=True, check=True, encoding="utf-8").stdout == "chosen\n"
