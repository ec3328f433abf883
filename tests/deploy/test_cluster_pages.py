"""docs/guides/clusters: metrics exist, settings are those that we set, and the script for Slurm is valid."""

from __future__ import annotations

import re
import subprocess

from sf_core.dataplane.control.metrics import PlaneMetrics
from sf_core.dataplane.gateway.observed import Metrics
from sf_core.dataplane.sessions.memory_budget import MemoryBudget
from sf_core.scheduling.worker import DASK_SETTINGS
from tests.bench import ROOT
from tests.deploy.commands import COMMANDS

PAGES = ROOT / "docs" / "guides" / "clusters"


def test_every_metric_in_the_docs_is_exported() -> None:
    exported = Metrics(PlaneMetrics({}, MemoryBudget())).text().decode()
    families = set(re.findall(r"^# TYPE (\w+)", exported, re.MULTILINE))
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES.glob("*.md"))
    named = set(re.findall(r"\bsf_[a-z_]+\b(?!/|\.)", pages))
    assert {name.removesuffix("_bucket") for name in named} - {"sf_core"} <= families


def test_a_plain_dask_scheduler_has_the_settings_of_ours() -> None:
    ours = {name: value for name, value in DASK_SETTINGS.items() if "__SCHEDULER__" in name}
    page = (PAGES / "workers.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^(DASK_DISTRIBUTED__SCHEDULER__\w+)=(\S+)$", page, re.MULTILINE)) == ours


def test_the_script_for_slurm_is_valid_and_its_commands_exist() -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (PAGES / "slurm.md").read_text(encoding="utf-8"), re.DOTALL)
    [script] = [block for block in blocks if block.startswith("#!/bin/bash\n#SBATCH")]
    subprocess.run(["bash", "-n"], input=script, check=True, encoding="utf-8")
    joined = re.sub(r"\$\(\((.+?)\)\)", "1", script.replace("\\\n", " "))
    commands = re.findall(r"\bsf ((?:server|scheduler|dataplane|worker|train) [^>&'\n]*)", joined)
    assert len(commands) == 7
    for command in commands:
        name, *options = re.sub(r'"\$\(hostname.*?\)"|"\$\w+"', "1", command).replace('"', "").split()
        COMMANDS[name].make_context(name, options).close()
