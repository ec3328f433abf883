"""A stranger who names a model in a configuration that we show gets what the model needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sf_core.config.yaml_file import load_config
from sf_core.stages.preflight.resolve import resolve
from sf_core.stages.preflight.stored_config import resolve_config
from sf_core.training.demonstrations import check_demonstrations

ROOT = Path(__file__).parents[2]
SHOWN = (
    "README.md",
    "docs/guides/agents/environments.md",
    "sf_core/cli/project/template/train.yaml.template",
    "examples/langgraph_agent/train.yaml",
    "configs/quickstart.yaml",
    "configs/colocated.yaml",
)
"""Pages and files that train the built-in policy, and in which a user then names a model."""
WITH_A_COMMENT = {"README.md", "sf_core/cli/project/template/train.yaml.template"}


def shown(place: str) -> str:
    text = (ROOT / place).read_text(encoding="utf-8")
    if not place.endswith(".md"):
        return text.replace("$module", "my_agent")
    block = re.search(r"^```yaml\n(.*?)^```$", text, re.M | re.S)
    assert block is not None
    return block[1]


@pytest.mark.parametrize("place", SHOWN)
def test_with_a_model_the_rate_is_derived_and_nothing_of_the_small_policy_stays(
    tmp_path: Path, place: str
) -> None:
    text = shown(place)
    with_model = re.sub(r"^# (policy: \{model: \S+\})  #.*$", r"\1", text, flags=re.M)
    assert (with_model != text) == (place in WITH_A_COMMENT)
    if place not in WITH_A_COMMENT:
        with_model += "\npolicy: {model: /models/Qwen3-0.6B}\n"
    file = tmp_path / "my.yaml"
    file.write_text(with_model, encoding="utf-8")
    config = resolve_config(load_config(file, ["run_id=r", f"storage.root={tmp_path}"]))
    assert config.policy.model == "/models/Qwen3-0.6B" and not config.policy.warm_steps
    check_demonstrations(config)
    assert resolve(config, 600_000_000)["train.learning_rate"].value == 9.5e-6
    if not place.startswith("configs/"):  # their tasks have short answers, whatever the policy
        assert config.rollout.max_tokens == 256


def test_the_agent_of_the_first_page_has_as_many_lines_as_its_heading_says() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^## Your agent in (\d+) lines$.*?^```python\n(.*?)^```$", text, re.M | re.S)
    assert found is not None
    assert len([line for line in found[2].splitlines() if line]) == int(found[1])
