import socket
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from sf_core.cli.stack import standing
from sf_core.cli.stack.local import Ports
from sf_core.cli.stack.standing import down, up
from sf_core.cli.stack.supervisor import StackError
from sf_core.config import RunConfig


def test_a_port_that_is_taken_is_named_and_nothing_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = replace(Ports.free(), dataplane=taken.getsockname()[1])
        with pytest.raises(
            OSError, match=f"^port {ports.dataplane} of 127.0.0.1 is in use; .* --dataplane-port$"
        ):
            up(tmp_path, RunConfig().cluster.workers, ports, print)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_one_is_named() -> None:
    ports = Ports.free()
    sentence = r" cannot be written \(File exists\); choose another --folder"
    # of a short name, as a socket's has to be
    with tempfile.NamedTemporaryFile() as file, pytest.raises(StackError, match=f"^{file.name}{sentence}"):
        up(Path(file.name), RunConfig().cluster.workers, ports, print)


def test_a_deployment_that_hangs_is_an_error_of_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "DEPLOY_S", 0.05)
    with pytest.raises(StackError, match=r"http\.server 0 did not end within 0 s"):
        standing._call({}, "http.server", "0")


def test_where_nothing_is_up_nothing_is_ended(tmp_path: Path) -> None:
    assert not down(tmp_path, print)
