"""Formulas that a configuration names: their kinds and contradictions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from sf_core.config import RunConfig, TrainConfig
from sf_core.config.reference.page import settings_page
from sf_core.config.validation import ConfigError, kinds_of, validate_config
from sf_core.config.yaml_file import describe_differences, find_differences, load_config
from sf_core.recipes.advantages import AnyAdvantage, LeaveOneOut
from sf_core.recipes.gates import AnyGate
from sf_core.recipes.losses import AnyPolicyLoss, Cispo, Clip
from sf_core.recipes.weights import AnyWeight, Fresh, Overlong
from sf_core.scheduling.plan import Worker, local_workers, make_plan
from sf_core.stages.settling.first_tasks import check_held_out

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
    check_held_out(load_config(path))
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


def judge(**settings: Any) -> dict[str, Any]:
    return {"environment": {"judges": {"quality": settings}}}


def select(keep: int, **settings: Any) -> dict[str, Any]:
    return {"train": {"select": {"kind": "extremes", "keep": keep}, **settings}}


AT_URL = {"url": "http://host:8000", "tokenizer": "folder", "divergence": "sampled"}


def taught(rollout: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    """Rewards teach nothing."""
    settings = {"advantage": "none", "teacher": {"model": "teacher"}, **train}
    return {"rollout": rollout or {}, "train": settings}


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "train.advantage none ignores rewards, so the run needs a teacher": taught(teacher=None),
    "needs a teacher other than version 0 of the policy": taught(teacher={"weights": "start"}),
    "rollout.gate, rollout.curriculum, train.select and train": taught({"gate": "varied"}),
    "train.loss.kl with `place: reward` use rewards, which have no": taught({"curriculum": {"pool": 100}}),
    "use rewards, which have no effect with train.advantage none": taught(
        select={"kind": "extremes", "keep": 2}
    ),
    "which have no effect with train.advantage none: leave these settings out": taught(
        loss={"kl": {"coefficient": 1, "place": "reward"}}
    ),
    "train.critic has no effect with train.advantage none": taught(critic={}),
    "train.teacher.url gives log-probs at temperature 1 of the whole vocabulary": taught(
        {"top_k": 5}, teacher=AT_URL
    ),
    "top_k and outside_groups (outside agents choose their own": taught(
        {"outside_groups": 1}, teacher=AT_URL
    ),
    "set exactly one of `model`, `url` and `weights`; given: none of them": taught(teacher={}),
    "set exactly one of `model`, `url` and `weights`; given: model and weights": taught(
        teacher={"model": "teacher", "weights": "start"}
    ),
    "the server at `url` returns only log-probs of sampled tokens": taught(
        teacher={"url": "http://host:8000", "tokenizer": "folder"}
    ),
    "set both `url` and `tokenizer`": taught(teacher={"url": "http://host:8000", "divergence": "sampled"}),
    "set either `url` or `model` for the judge; given: neither": judge(),
    "either `url` or `model` for the judge; given: both": judge(url="http://host:8000/v1", model="folder"),
    "`name` selects a model on the server at `url`, but this judge has no `url`: leave `name` out": judge(
        model="folder", name="it"
    ),
    "max_tokens_per_iteration (99) is less than max_tokens of one reply (256)": judge(
        model="folder", max_tokens_per_iteration=99, max_tokens=256
    ),
    "train.advantage group compares the sessions of a group, but rollout.group_size is 1": {
        "rollout": {"group_size": 1}
    },
    "train.advantage whitened compares the sessions of a group": {
        "rollout": {"group_size": 1},
        "train": {"advantage": {"kind": "whitened", "baseline": True}},
    },
    "rollout.gate varied drops groups in which all rewards are equal, so with": {
        "rollout": {"group_size": 1, "gate": "varied"},
        "train": {"advantage": "whitened"},
    },
    "rollout.outside_groups (5) must not exceed rollout.groups_per_batch (4)": {
        "rollout": {"outside_groups": 5, "groups_per_batch": 4}
    },
    "relative does not support negative rewards, but rollout.failed_reward is -1": {
        "rollout": {"failed_reward": -1},
        "train": {"advantage": "relative"},
    },
    "train.weights cannot rank tokens by entropy at rollout.temperature 0": {
        "rollout": {"temperature": 0},
        "train": {"weights": ["surprising"]},
    },
    "train.loss.entropy has no effect at rollout.temperature 0": {
        "rollout": {"temperature": 0},
        **loss(entropy=0.1),
    },
    "sequence_clip has one ratio per row": loss(policy="sequence_clip"),
    "train.loss.policy plain has no ratio": loss(policy="plain", ratio_to="step_start"),
    "m2po computes its bounds from the ratio to the policy that sampled": loss(
        policy="m2po", ratio_to="step_start"
    ),
    "train.loss.ratio_to behaviour already corrects for lag, so train.loss.correction would": loss(
        correction={}
    ),
    "train.loss.policy.beyond dual needs train.loss.policy.cap": loss(policy={"beyond": "dual", "cap": None}),
    "train.loss.policy.cap (1.2) must exceed 1 + `high` (0.28) with `beyond: dual`": loss(
        policy={"beyond": "dual", "cap": 1.2}
    ),
    "train.weights fresh has no effect: the lag of this run's tokens is at most 1": {
        "train": {"weights": ["fresh"]}
    },
    "train.weights lists the same kind twice": {"train": {"weights": ["overlong", "overlong"]}},
    "train.loss.kl.renew_every must be less than train.iterations (40)": loss(
        kl={"coefficient": 1.0, "renew_every": 40}
    ),
    "train.advantage gae needs the values of a critic: add train.critic, as `critic: {}`": {
        "train": {"advantage": "gae"}
    },
    "train.critic has no effect with train.advantage group": {"train": {"critic": {}}},
    "train.weights gated needs the values of a critic": {"train": {"weights": ["gated"]}},
    "train.advantage pair needs train.loss.policy plain": {"train": {"advantage": "pair"}},
    "train.advantage pair is computed before the first optimiser step": {
        "train": {"advantage": "pair", "loss": {"policy": "plain"}, "minibatches": 2}
    },
    "rollout.gate mixed needs 5 right and 5 wrong sessions, but a group has 8 (rollout.group_size): "
    "lower `least`": {"rollout": {"gate": {"kind": "mixed", "least": 5}}},
    "environment.group_reward waits for the answers of all sessions of a group, but rollout.spare_sessions "
    "stops the slowest sessions: leave one of the two out": {
        "environment": {"group_reward": "a:b"},
        "rollout": {"spare_sessions": 1},
    },
    "environment.group_reward scores the answers of the run's own agents, but the rewards of "
    "rollout.outside_groups come from outside: leave one of the two out": {
        "environment": {"group_reward": "a:b"},
        "rollout": {"outside_groups": 1},
    },
    "rollout.least_sessions (9) must not exceed rollout.group_size (8)": {"rollout": {"least_sessions": 9}},
    "rollout.curriculum.pool (8) must exceed the number of groups in flight, rollout.groups_per_batch (4) "
    "times 1 + lag (1), because two groups never sample a task at the same time": {
        "rollout": {"groups_per_batch": 4, "curriculum": {"pool": 8}}
    },
    "rollout.curriculum.stages has a stage that begins after the last iteration (train.iterations 40): lower "
    "the `until` of the previous stage, or leave this stage out": stages({"until": 40}, {}),
    "rollout.curriculum.stages are shares of an environment's parts, but environment.tasks, a function "
    "of your own, has no parts: leave one of the two out": {
        **stages({}),
        "environment": {"tasks": "mine:tasks"},
    },
    "rollout.curriculum chooses tasks of the environment, but all groups come from outside "
    "(rollout.outside_groups): leave one of the two out": {
        "rollout": {"outside_groups": 32, "curriculum": {"pool": 100}}
    },
    "rollout.curriculum.sizes.fewer (8) must be below rollout.group_size (8)": curriculum(sizes={"fewer": 8}),
    "train.advantage group compares the sessions of a group, but rollout.curriculum.sizes.fewer is 1: raise "
    "rollout.curriculum.sizes.fewer, or use train.advantage whitened": curriculum(sizes={"fewer": 1}),
    "rollout.gate mixed drops every group of 3 sessions: raise rollout.curriculum.sizes.fewer": curriculum(
        {"gate": {"kind": "mixed", "least": 2}}, sizes={"fewer": 3}
    ),
    "train.select.keep (8) must be below rollout.group_size (8): lower train.select.keep, or leave "
    "train.select out": select(8),
    **{
        f"train.advantage {kind} compares sessions of the whole batch, but train.select extremes keeps the "
        "best and the worst sessions of each group: use train.advantage group, or leave train.select "
        "out": select(4, advantage=kind, critic={} if kind == "gae" else None)
        for kind in ("gae", "whitened", "role_baseline")
    },
    "`mean_over: constant` and session_tokens need each other": loss(mean_over="constant"),
    "and session_tokens need each other: set both or neither": loss(session_tokens=10),
}


@pytest.mark.parametrize("sentence", CONTRADICTIONS)
def test_what_does_not_go_together_is_refused_in_one_sentence(sentence: str) -> None:
    with pytest.raises(ValidationError) as refused:
        config(**CONTRADICTIONS[sentence])
    (error,) = refused.value.errors()
    assert sentence in error["msg"] and "\n" not in error["msg"]


@pytest.mark.parametrize(
    "rules", [{"order": "draw"}, {"solved": 0.5}, {"unsolved": 0.5}, {"sizes": {"fewer": 4}}], ids=str
)
def test_what_goes_by_earlier_groups_needs_a_pool(rules: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        config(**curriculum(**{**rules, "pool": None}))
    (error,) = refused.value.errors()
    assert error["msg"] == (
        "Value error, rollout.curriculum with `order: draw`, `sizes`, or `solved` or `unsolved` below 1 "
        "uses the earlier results of tasks, but without `pool` no task is sampled twice: set "
        "rollout.curriculum.pool"
    )


@pytest.mark.parametrize(
    "parts",
    [
        [{"until": 4}],
        [{}, {}],
        [{"until": 8}, {"until": 8}, {}],
        [{"until": 8}, {"until": 4}, {}],
        [{"until": 4}, {"until": 8}],
    ],
    ids=str,
)
def test_stages_that_do_not_rise_or_do_not_end_with_an_open_one_are_refused(parts: list[Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        config(**stages(*parts))
    (error,) = refused.value.errors()
    assert error["msg"] == (
        "Value error, rollout.curriculum.stages: each stage except the last needs an `until` above the "
        "`until` of the previous stage; the last stage must not have an `until`"
    )


@pytest.mark.parametrize("rules", [{"explore": 0.2}, {"utility": "hard"}], ids=str)
def test_what_draws_alone_look_at_is_refused_with_epochs(rules: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        config(**curriculum(**rules))
    (error,) = refused.value.errors()
    assert error["msg"] == (
        "Value error, rollout.curriculum.explore and rollout.curriculum.utility have no effect with `order: "
        "epochs`: use `order: draw`, or leave `explore` and `utility` out"
    )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"floor": 1.5}, "rollout.curriculum.floor: input should be less than or equal to 1, got 1.5"),
        ({"solved_share": 0}, "rollout.curriculum.solved_share: input should be greater than 0, got 0"),
        ({"pool": 0}, "rollout.curriculum.pool: input should be greater than or equal to 1, got 0"),
        (
            {"stages": [{"shares": {"calculator": 0}}]},
            "rollout.curriculum.stages.0.shares.calculator: input should be greater than 0, got 0",
        ),
        ({"sizes": {}}, "rollout.curriculum.sizes.fewer: field required"),
    ],
    ids=str,
)
def test_a_bound_of_a_curriculum_is_named_with_its_setting(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate_config(curriculum(**settings))
    assert str(refused.value) == f"config: {told}"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"kind": "extremes", "keep": 0}, "keep: input should be greater than or equal to 2, got 0"),
        ({"kind": "extremes", "keep": 3}, "keep: input should be a multiple of 2, got 3"),
        ("extremes", "keep: field required"),
        ({"kind": "worst", "keep": 4}, "kind: input should be 'extremes', got 'worst'"),
        ({"keep": 4, "best": 1}, "best: unknown key; allowed here: kind, keep"),
    ],
    ids=str,
)
def test_a_wrong_selection_is_named_with_its_setting(settings: Any, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate_config({"train": {"select": settings}})
    assert str(refused.value) == f"config: train.select.{told}"


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ValidationError, match="lists the same kind twice") as refused:
        config(rollout={"group_size": 1}, train={"weights": ["overlong", "overlong"]})
    assert "rollout.group_size is 1" in str(refused.value)


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
