"""The files that docs/guides/agents/product.md shows; tests/e2e/test_product.py trains with its service."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sf_core.config.yaml_file import load_config

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "agents" / "product.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


def test_the_configuration_of_the_page_takes_all_groups_from_outside(tmp_path: Path) -> None:
    [text] = blocks("yaml")
    (tmp_path / "product.yaml").write_text(text, encoding="utf-8")
    assert load_config(tmp_path / "product.yaml").rollout.is_external


def test_the_callers_of_the_page_prefer_short_answers_that_name_the_thing() -> None:
    _, desk, callers = blocks("python")
    compile(callers, "callers.py", "exec")
    page: dict[str, Any] = {}
    exec(compile(desk, "desk.py", "exec"), page)
    seen, held_out = ({page["tasks"](split, i).prompt for i in range(8)} for split in ("train", "holdout"))
    assert len(seen) == len(held_out) == 8 and not seen & held_out
    task = page["tasks"]("holdout", 0)
    stars = page["stars"]
    drafts = ["It falls.", "Snow " * 60, "Snow is frozen water and " + "so on " * 7, "Snow is frozen rain."]
    assert [stars(task.prompt, draft) for draft in drafts] == [0, 1, 4, 5]
    assert page["reward"](task, drafts[-1]) == 1
