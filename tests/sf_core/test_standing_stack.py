import shlex
import socket
from pathlib import Path

import pytest
from supervisor.options import ServerOptions

from sf_core.config import RunConfig
from sf_core.local_stack import StackError, free_port
from sf_core.parts import Part
from sf_core.standing_stack import Ports, configuration, down, up


def test_supervisord_reads_a_part_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    part = Part("a", ["run", "50%", "two words"], {"B": """say "50%" or '\\'"""}, gives_way=True)
    file = tmp_path / "supervisord.conf"
    file.write_text(configuration(tmp_path, [part]))
    options = ServerOptions()
    options.realize(["-c", str(file)])
    read = options.process_group_configs[0].process_configs[0]
    environment = [f"B={part.env['B']}"]
    assert shlex.split(read.command) == ["nice", "-n", "10", "env", *environment, *part.command]
    assert (read.name, read.stdout_logfile) == ("a", f"{tmp_path}/logs/a.log")


def test_a_port_that_is_taken_is_named_and_nothing_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = Ports(free_port(), free_port(), taken.getsockname()[1])
        with pytest.raises(StackError, match=f"port {ports.dataplane} is in use"):
            up(tmp_path, RunConfig().cluster.workers, ports, print)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_path_is_too_long_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    ports = Ports(free_port(), free_port(), free_port())
    with pytest.raises(StackError, match="too long for a socket; choose a shorter one with --folder"):
        up(folder, RunConfig().cluster.workers, ports, print)


def test_where_nothing_is_up_nothing_is_ended(tmp_path: Path) -> None:
    assert not down(tmp_path)
