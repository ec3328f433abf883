from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.repositories.generate import generate
from examples.repositories.libraries import Library
from sf_core.config.run_config import EnvironmentConfig
from sf_core.environments.registry import environment_of
from sf_core.environments.repositories.environment import Repositories
from tests.bench.repositories import LISTS, TEST_LISTS
from tests.bench.sandboxes import need_sandbox

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "agents" / "repositories.md"


def blocks(language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def test_the_example_of_the_documentation_makes_a_data_set_for_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_sandbox()
    files = {
        "shop/__init__.py": "",
        "shop/lists.py": LISTS,
        "shop/tests/__init__.py": "",
        "shop/tests/test_lists.py": TEST_LISTS.replace("from lists.", "from shop."),
    }
    for name, text in files.items():
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "checkout" / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    [example] = blocks("python")
    assert "per_library=5" in example
    exec(compile(example.replace("per_library=5", "per_library=2"), str(PAGE), "exec"), {})
    for text in blocks("yaml"):
        environment = environment_of(EnvironmentConfig.model_validate(yaml.safe_load(text)["environment"]))
        assert environment.tasks("train", 0).task_id == "acme__shop-0"
        assert environment.tasks("holdout", 0).task_id == "acme__shop-1"


@pytest.mark.nightly
@pytest.mark.timeout(7200)
async def test_installed_libraries_give_two_hundred_instances_of_which_each_is_right(tmp_path: Path) -> None:
    need_sandbox()
    command = [sys.executable, "-m", "examples.repositories.generate"]
    for name in ("one", "two"):
        subprocess.run([*command, str(tmp_path / name)], check=True)
    made = (tmp_path / "one" / "dataset.jsonl").read_text(encoding="utf-8")
    assert made == (tmp_path / "two" / "dataset.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in made.splitlines()]
    assert len(rows) >= 200 and len({row["repo"] for row in rows}) >= 10
    environment = Repositories.model_validate(
        {
            "dataset": str(tmp_path / "one" / "dataset.jsonl"),
            "repositories": str(tmp_path / "one" / "repositories"),
        }
    )

    async def rewards(row: dict[str, Any]) -> tuple[float, float]:
        gold = await environment.score(row["instance_id"], row["patch"])
        return gold, await environment.score(row["instance_id"], "")

    for row in rows:
        gold, nothing = await rewards(row)
        assert nothing < gold == 1, row["instance_id"]


async def test_equal_seeds_make_equal_data_sets(
    generated: Path, libraries: list[Library], tmp_path: Path
) -> None:
    again = await generate(tmp_path / "again", libraries[:1], per_library=2)
    lines = (generated / "dataset.jsonl").read_text(encoding="utf-8").splitlines()
    assert again.read_text(encoding="utf-8").splitlines() == lines[:2]
