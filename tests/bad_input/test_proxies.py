"""Variables of proxies that make every HTTP client of Prefect fail are refused before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sf_core.cli.arguments.proxies import check_proxies
from sf_core.process.environment_variables import reach_directly
from sf_core.process.import_path import ROOT
from tests import bench
from tests.bench import proxies
from tests.bench.refusals import check_sentence

SOCKS = ("socks5://127.0.0.1:1080", "socks5h://me:hidden@proxy.example:1080")
WRONG = (
    "socks4://h:1",
    "ftp://h:1",
    "http://h:abc",
    "http://[::1",
    "http://me:hidden@h:abc",
    "http://me:hidden/x@h:1",
    "me:hidden/x@h:1",
)
UNREADABLE = ("fd00::/8", "[::1]", "[fd00::]/8", "2001:db8::/32:80")
GOOD = ("::1", "10.0.0.0/8", "*", ".example.com", "host:80", "", " localhost ", "fe80::1")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*proxies.VARIABLES, *proxies.EXCEPTIONS):
        monkeypatch.delenv(name, raising=False)
    yield


def refusal() -> str:
    with pytest.raises(ValueError, match=r"_PROXY|_proxy") as refused:
        check_proxies()
    assert "hidden" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("name", proxies.VARIABLES)
@pytest.mark.parametrize("value", SOCKS)
def test_a_socks_proxy_needs_its_package(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    if find_spec("socksio") is not None:
        check_proxies()
        return
    check_sentence(refusal(), f"{name} names a SOCKS proxy (socks5", "pip install 'httpx[socks]'")


@pytest.mark.parametrize("name", proxies.VARIABLES)
@pytest.mark.parametrize("value", WRONG)
def test_what_is_no_address_of_a_proxy_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    check_sentence(refusal(), f"{name} is ", "which is not the address of a proxy", f"or unset {name}")


@pytest.mark.parametrize("name", proxies.EXCEPTIONS)
@pytest.mark.parametrize("value", UNREADABLE)
def test_an_exception_that_no_client_can_read_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, f"localhost, {value},10.0.0.0/8")
    check_sentence(refusal(), f"{name} contains {value!r}", "addresses without brackets", "range")


@pytest.mark.parametrize("name", proxies.EXCEPTIONS)
def test_other_exceptions_and_proxies_are_used(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, ",".join(GOOD))
    for proxy in proxies.VARIABLES:
        monkeypatch.setenv(proxy, "http://me:hidden@proxy.example:3128")
    before = dict(os.environ)
    check_proxies()
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    "given",
    [
        {"ALL_PROXY": SOCKS[0], "NO_PROXY": "*"},
        {"ALL_PROXY": "socks4://h:1", "no_proxy": "localhost, *"},
        {"NO_PROXY": f"{UNREADABLE[0]},*"},
        # the other is what libraries read
        {"HTTP_PROXY": SOCKS[0], "http_proxy": "http://proxy.example:3128"},
    ],
)
def test_what_no_client_reads_is_not_refused(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    check_proxies()
    assert dict(os.environ) == before
    reach_directly()
    with httpx.Client(verify=False) as client:
        assert client.trust_env


ENTRIES = st.sampled_from([*GOOD, *UNREADABLE, "a b", "http://h", "[", ":", "/", "%"])
ADDRESSES = st.sampled_from(["", "h:1", "h", "https://h:1", "//h:1", " ", *WRONG, *SOCKS])


@settings(max_examples=bench.properties.examples(60), deadline=None)
@given(
    values=st.dictionaries(st.sampled_from(proxies.VARIABLES), ADDRESSES),
    exceptions=st.dictionaries(
        st.sampled_from(proxies.EXCEPTIONS), st.lists(ENTRIES, max_size=3).map(",".join)
    ),
)
def test_after_the_check_a_client_can_be_made_and_reaches_this_machine_directly(
    values: dict[str, str], exceptions: dict[str, str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**values, **exceptions}.items():
            patch.setenv(name, value)
        for name in proxies.EXCEPTIONS:
            # `reach_directly` sets both
            patch.setenv(name, os.environ.get(name, ""))
        try:
            check_proxies()
        except ValueError as error:
            assert str(error)
            return
        reach_directly()
        with httpx.Client(verify=False) as client:
            assert client.trust_env


@pytest.mark.parametrize(
    ("name", "value"), [("ALL_PROXY", "socks4://127.0.0.1:1080"), ("NO_PROXY", "fd00::/8")]
)
def test_sf_train_refuses_before_anything_starts(name: str, value: str) -> None:
    command = [sys.executable, "-m", "sf_core", "train", "quickstart"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), name: value}
    done = subprocess.run(
        command, env=environment, capture_output=True, encoding="utf-8", timeout=bench.waits.patience(60)
    )
    assert done.returncode == 2 and done.stdout == "", done.stdout
    assert done.stderr.startswith(f"error: {name} ") and done.stderr.count("\n") == 1
