"""The examples that a stranger copies learn: README's, that of a page, and the project of `sf init`."""

from __future__ import annotations

from pathlib import Path

import pytest

from sf_core.stages.preflight.stored_config import read_stored_config
from tests.bench import learning
from tests.bench.stacks import quickstart
from tests.bench.stacks.invariants import check_result


def train(folder: Path, *configs: str, seed: int) -> None:
    """Train in this folder, with all else as the files have it, and check that the policy has learned."""
    trained = quickstart.sf(
        folder, "train", *configs, *quickstart.options(run_id="first", seed=seed), quiet_s=600
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    run = folder / "runs" / "first"
    check_result(read_stored_config(str(run)))
    learning.check_learning(run)


# 250 CPU-seconds each; that policies learn is in test_quickstart.py
@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_agent_of_readme_learns_to_spell_words_backward(tmp_path: Path, seed: int) -> None:
    learning.copy_example("README.md", tmp_path, python="speller.py", yaml="my.yaml")
    train(tmp_path, "my.yaml", seed=seed)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_project_of_sf_init_learns_as_the_tutorial_says(tmp_path: Path, seed: int) -> None:
    made = quickstart.sf(tmp_path, "init", "my-agent")
    assert made.returncode == 0, made.stderr
    train(tmp_path / "my-agent", "train.yaml", seed=seed)


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", [(), ("gspo",)], ids=["plain", "gspo"])
def test_the_agent_of_the_page_on_environments_learns(tmp_path: Path, recipe: tuple[str, ...]) -> None:
    page = "docs/guides/agents/environments.md"
    learning.copy_example(page, tmp_path, python="my_agent.py", yaml="my.yaml")
    train(tmp_path, "my.yaml", *recipe, seed=0)
