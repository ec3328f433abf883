"""Formulas that a configuration names: their kinds, and what goes together. What does not is in
tests/bad_input/test_contradictions.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sf_core.config import RunConfig, TrainConfig
from sf_core.config.reference.page import settings_page
from sf_core.config.validation import kinds_of
from sf_core.config.yaml_file import describe_differences, find_differences, load_config
from sf_core.recipes.advantages import AnyAdvantage, LeaveOneOut
from sf_core.recipes.gates import AnyGate
from sf_core.recipes.losses import AnyPolicyLoss, Cispo, Clip
from sf_core.recipes.weights import AnyWeight, Fresh, Overlong
from sf_core.scheduling.plan import Worker, local_workers, make_plan
from sf_core.stages.preflight.facts import SPLITS, Facts
from sf_core.stages.preflight.first_tasks import curriculum_fault, tasks_fault

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(sections)


def test_a_kind_is_chosen_by_its_name_alone_or_with_its_settings() -> None:
    train = TrainConfig.model_validate(
        {"advantage": "leave_one_out", "weights": ["overlong", {"kind": "fresh", "max_lag": 3}]}
    )
    assert train.advantage == LeaveOneOut() and train.weights == (Overlong(), Fresh(max_lag=3))
    assert TrainConfig.model_validate({"loss": {"policy": {"high": 0.4}}}).loss.policy == Clip(high=0.4)
    assert TrainConfig.model_validate(train.model_dump(mode="json")) == train


def test_a_formula_is_changed_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("train:\n  loss:\n    policy: {kind: clip, low: 0.1}\n", encoding="utf-8")
    changed = load_config(path, ["train.loss.policy={kind: cispo, high: 0.5}"])
    assert changed.train.loss.policy == Cispo(high=0.5)
    assert load_config(path, ["train.loss.policy.high=0.5"]).train.loss.policy == Clip(low=0.1, high=0.5)
    default = RunConfig()
    cispo = Cispo(high=0.5)
    assert list(find_differences(default, changed)) == [("train.loss.policy", Clip(), cispo)]
    assert describe_differences({}, {"train": {"loss": {"policy": cispo.model_dump()}}}) == [
        "train.loss.policy {'high': 0.5, 'kind': 'cispo'} (deployed: {'beyond': 'truncate', "
        "'cap': 5.0, 'high': 0.28, 'kind': 'clip', ...})"
    ]


def test_the_form_is_offered_every_kind_in_the_words_that_it_knows() -> None:
    schema = RunConfig.model_json_schema()
    sections = [schema, *schema["$defs"].values()]
    assert not any(
        "oneOf" in field or "discriminator" in field for s in sections for field in s["properties"].values()
    )
    policy = schema["$defs"]["LossConfig"]["properties"]["policy"]
    named = [schema["$defs"][one["$ref"].rsplit("/", 1)[1]] for one in policy["anyOf"]]
    assert [one["properties"]["kind"]["enum"] for one in named][:3] == [
        ["plain"],
        ["cispo"],
        ["m2po"],
    ]
    assert "oneOf" not in schema["$defs"]["TrainConfig"]["properties"]["weights"]["items"]


def test_the_page_of_settings_shows_the_other_kinds_and_loads_as_the_default() -> None:
    page = settings_page()
    for shown in (
        "# kind leave_one_out: The reward of a session",
        "# kind surprising: Only the tokens",
        "# kind m2po: ",
    ):
        assert shown in page
    assert "#   budget: Maximum mean squared log-ratio. By default 0.04." in page
    assert "#   coefficient: Weight of the penalty." in page
    assert RunConfig.model_validate(yaml.safe_load(page)) == RunConfig()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_valid_and_has_a_page(path: Path) -> None:
    config = load_config(path)
    facts = Facts(config, splits=SPLITS)
    assert curriculum_fault(config, facts) is None and tasks_fault(config, facts) is None
    both = load_config(["quickstart", path])
    make_plan([Worker(name, frozenset(w.tags)) for name, w in local_workers(both, 0).items()], both)
    assert both != load_config("quickstart")
    assert 10 <= len(path.read_text(encoding="utf-8").splitlines()) <= 25
    page = (ROOT / "docs" / "recipes" / f"{path.stem}.md").read_text(encoding="utf-8")
    assert re.search(rf"^sf train .*\b{path.stem}\b", page.split("```bash")[1], re.M)
    for part in ("When to use it", "Differences from the quickstart", "Metrics", "Known problems"):
        assert f"**{part}.**" in page
    assert "https://arxiv.org/abs/" in page


@pytest.mark.parametrize("name", ["greso", "bots", "progress", "april"])
def test_a_recipe_that_only_chooses_tasks_or_devices_goes_with_a_formula(name: str) -> None:
    formula = load_config("gspo")
    chosen = load_config(name)
    both = load_config(["gspo", name])
    assert both.train.loss == formula.train.loss and both.rollout.curriculum == chosen.rollout.curriculum
    assert both.rollout.group_size == formula.rollout.group_size


def test_the_page_of_recipes_names_every_recipe_and_every_kind() -> None:
    page = (ROOT / "docs" / "recipes" / "README.md").read_text(encoding="utf-8")
    assert {f"{path.stem}.md" for path in RECIPES} == set(re.findall(r"^\| \[.*\]\((.*)\)", page, re.M))
    gates = page.split("| `rollout.gate`")[1].split("| `train.")[0]
    assert set(re.findall(r"^\| `(\w+)`", gates, re.M)) == set(kinds_of(AnyGate))
    tables = page.split("| `train.")[1:]
    for table, union in zip(tables, (AnyAdvantage, AnyWeight, AnyPolicyLoss), strict=True):
        assert set(re.findall(r"^\| `(\w+)`", table, re.M)) == set(kinds_of(union))


def loss(**settings: Any) -> dict[str, Any]:
    return {"train": {"loss": settings}}


def curriculum(rollout: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    return {"rollout": {**(rollout or {}), "curriculum": {"pool": 100, **settings}}}


def stages(*parts: dict[str, Any]) -> dict[str, Any]:
    return curriculum(pool=None, stages=[{"shares": {"calculator": 1}, **part} for part in parts])


def select(keep: int, **settings: Any) -> dict[str, Any]:
    return {"train": {"select": {"kind": "extremes", "keep": keep}, **settings}}


@pytest.mark.parametrize(
    "sections",
    [
        {"rollout": {"group_size": 1}, "train": {"advantage": "whitened"}},
        {"rollout": {"group_size": 1}, "train": {"advantage": "gae", "critic": {}}},
        loss(policy="plain", correction={}),
        loss(ratio_to="step_start", correction={}),
        loss(policy="sequence_clip", mean_over="session"),
        {"rollout": {"max_lag": 3}, "train": {"weights": [{"kind": "fresh", "max_lag": 2}]}},
        loss(kl={"coefficient": 1.0, "renew_every": 39}),
        {"rollout": {"gate": {"kind": "mixed", "least": 4}, "least_sessions": 8}},
        {"rollout": {"groups_per_batch": 4, "curriculum": {"pool": 9, "order": "draw", "utility": "hard"}}},
        {"rollout": {"groups_per_batch": 4, "overlap": False, "curriculum": {"pool": 5, "solved": 0}}},
        {"rollout": {"outside_groups": 31, "curriculum": {"pool": 100}}},
        {**curriculum(sizes={"fewer": 1}), "train": {"advantage": "whitened"}},
        curriculum({"gate": "varied"}, sizes={"fewer": 2}),
        stages({"until": 4}, {"until": 39}, {}),
        {**curriculum(), "environment": {"tasks": "mine:tasks"}},
        {**curriculum(sizes={"fewer": 2}), **select(6, advantage="leave_one_out")},
    ],
)
def test_what_goes_together_is_taken(sections: dict[str, Any]) -> None:
    config(**sections)
