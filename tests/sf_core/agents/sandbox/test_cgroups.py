"""Control groups, on plain folders: a host of the tests may have none of version 2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sf_core.agents.command_output import CommandOutput
from sf_core.agents.sandbox import Ended, Sandbox, cgroups
from sf_core.config.programs import SandboxLimits
from tests.bench.sandboxes import inside


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A group of this process beside which groups with limits can be made."""
    (tmp_path / "app.slice" / "ours.scope").mkdir(parents=True)
    (tmp_path / "own").write_text("4:memory:/elsewhere\n0::/app.slice/ours.scope\n", encoding="utf-8")
    (tmp_path / "app.slice" / "cgroup.subtree_control").write_text("cpu memory pids\n", encoding="utf-8")
    (tmp_path / "app.slice" / "cgroup.procs").write_text("", encoding="utf-8")
    monkeypatch.setattr(cgroups, "MOUNT", tmp_path)
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "own")
    return tmp_path / "app.slice"


def test_a_group_is_made_where_memory_and_processes_can_be_limited(groups: Path) -> None:
    assert cgroups.parent_group() == groups
    (groups / "cgroup.subtree_control").write_text("cpu\n", encoding="utf-8")
    assert cgroups.parent_group() is None


def test_a_sandbox_begins_in_its_group(groups: Path) -> None:
    limits = SandboxLimits(memory_mb=100, processes=7)

    async def work(box: Sandbox) -> Ended:
        [group] = groups.glob(f"sf-sandbox-{os.getpid()}-*")
        assert (group / "memory.max").read_text(encoding="utf-8") == str(132 * 2**20)
        assert (group / "pids.max").read_text(encoding="utf-8") == "9"
        assert box.limits_by == "cgroup"
        assert (group / "cgroup.procs").read_text(encoding="utf-8").strip().isdigit()
        assert (await box.run(["true"], timeout_s=60)).ended_by == "exit"

        class Killing(CommandOutput):
            def on_output(self, data: bytes) -> None:
                super().on_output(data)
                (group / "memory.events").write_text("max 3\noom_kill 1\n", encoding="utf-8")

        return await box.run(["sh", "-c", "echo 1; kill -9 $$"], timeout_s=60, written=Killing())

    assert inside(work, limits) == Ended(-9, "memory", "1\n")
