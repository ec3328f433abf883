import math
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sf_core.config import RunConfig
from sf_core.config.programs import Command
from sf_core.config.validation import ConfigError, validate_config
from sf_core.config.yaml_file import describe_differences, find_differences, load_config, merge_sections
from sf_core.settings import Settings


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 3\nrollout:\n  group_size: 4\n", encoding="utf-8")
    return path


def test_overrides_replace_values_of_the_file_and_add_new_ones(config_file: Path) -> None:
    config = load_config(config_file, ["seed=7", "storage.root=/data/runs", "rollout.group_size=16"])
    assert (config.seed, config.storage.root, config.rollout.group_size) == (7, "/data/runs", 16)


def test_an_override_within_a_list_says_how_to_give_it() -> None:
    sentence = (
        "--set train.weights.0.kind=fresh: weights is a list: give the whole list, as --set "
        "train.weights=[...]"
    )
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load_config("dapo", ["train.weights.0.kind=fresh"])


def test_a_resolved_configuration_reads_back_equal(config_file: Path) -> None:
    config = load_config(config_file)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("given", "used"), [("1e-44", 0.01), ("0.009", 0.01), ("0.02", 0.02), ("0", 0.0), ("-0.0", 0.0)]
)
def test_a_temperature_that_logits_would_overflow_at_is_raised(given: str, used: float) -> None:
    rollout = load_config("quickstart", [f"rollout.temperature={given}", "rollout.top_p=1e-44"]).rollout
    assert (rollout.temperature, rollout.top_p) == (used, 1e-6)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("rollout.gruop_size=4", "rollout.gruop_size: unknown key; allowed here: group_size, "),
        ("rollout.success=answer", "rollout.success: expected a mapping of its settings, got 'answer'"),
        (
            "rollout.curriculum=[progress]",
            "rollout.curriculum: expected a mapping of its settings, got ['progress']",
        ),
        (
            "rollout.curriculum.stages={until: 3}",
            "rollout.curriculum.stages: expected a list, got {'until': 3}",
        ),
        ("rollout.top_k=2147483648", "rollout.top_k: input should be less than or equal to 2147483647, "),
        ("rollout.temperature=.nan", "rollout.temperature: input should be a finite number, got nan"),
        ("colour=red", "colour: unknown key; allowed here: run_id, seed, pipeline, policy"),
        ("train.max_grad_norm=.inf", "train.max_grad_norm: input should be a finite number, got inf"),
        ("train.betas=[.nan, 0.9]", "train.betas.0: input should be a finite number, got nan"),
        (
            "engine.kind=vlm",
            "engine.kind: input should be 'torch', 'vllm', 'scripted' or 'emulated', got 'vlm'",
        ),
        ("environment.agent=agent", "environment.agent: expected package.module:name, got 'agent'"),
        ("environment.agent=[1]", "environment.agent: input should be a valid string, got [1]"),
        ("environment.agent={command: []}", "environment.agent.command: tuple should have at least 1 item"),
        (
            "environment.agent.command=claude -p",
            "environment.agent.command: expected a list of words such as [claude, -p], got 'claude -p'",
        ),
        (
            "environment.agent={command: [a], anser: folder}",
            "environment.agent.anser: unknown key; allowed here: command, answer, timeout_s, variables",
        ),
        ("environment.agent.answer=file", "environment.agent.answer: expected output, folder or file:NAME"),
        ("environment.agent.answer=file:../a", "expected a file in the command's folder, got 'file:../a'"),
        ("environment.agent.answer=file:/a", "expected a file in the command's folder, got 'file:/a'"),
        ("environment.agent.variables={a-b: x}", "'a-b' is not a valid name of an environment variable: use"),
        ("run_id=../etc", "run_id: expected at most 100 letters, digits, `.`, `_` and `-`, "),
        ("run_id=größe", "the first a letter or digit, got 'größe'"),
        (
            "rollout.max_tokens=9999",
            "rollout.max_tokens (9999) must be less than engine.context_length (512)",
        ),
        ("train.backend=fsdp", "train.backend: input should be 'torch', 'megatron' or 'emulated', got"),
        (
            "train.pipeline_parallel=2",
            "train.tensor_parallel (1) times train.pipeline_parallel (2) needs train.backend megatron; other",
        ),
        (
            "train.loss.policy=gspo",
            "train.loss.policy.kind: expected one of plain, cispo, m2po, sequence_clip, custom, clip, got",
        ),
        (
            "train.loss.policy={kind: cispo, cap: 3}",
            "train.loss.policy.cap: unknown key; allowed here: kind, high",
        ),
        ("train.loss.policy.low=7", "train.loss.policy.low: input should be less than or equal to 1, got 7"),
        (
            "train.weights=[fresh, {kind: surprising, share: 2}]",
            "train.weights.1.share: input should be less",
        ),
        ("train.weights=[{kind: fesh}]", "train.weights.0.kind: expected one of overlong, unparsed, fresh, "),
        ("train.advantage=[1]", "train.advantage: "),
        (
            "train.loss.mean_over=constant",
            "train.loss: `mean_over: constant` and session_tokens need each other",
        ),
        ("train.minibatches=64", "train.minibatches (64) must not exceed rollout.groups_per_batch (32)"),
        (
            "train.teacher={url: localhost:8000}",
            "train.teacher.url: expected http://HOST:PORT without a user or",
        ),
        ("train.teacher={url: http://me:word@host}", "set a key as an environment variable"),
        (
            "engine.vllm.sleep_level=3",
            "engine.vllm.sleep_level: input should be less than or equal to 2, got 3",
        ),
        ("engine.kind=scripted", "engine.script is required with engine.kind: scripted"),
        (
            "cluster.workers.r0.tag=x",
            "cluster.workers.r0.tag: unknown key; allowed here: tags, device, device_kind, threads",
        ),
        (
            "cluster.workers.r0.tags=[a b]",
            "cluster.workers.r0.tags.0: 'a b' is not a valid tag or name: use letters",
        ),
        ("cluster.workers.r0.device_kind=k80", "unknown device kind 'k80'; use one of a100, "),
        ("pipeline=colocate", "pipeline: input should be 'colocated', 'disaggregated', 'async' or"),
        ("train.min_workers=2", "train.min_workers (2) must not exceed train.workers (1)"),
    ],
)
def test_a_wrong_setting_is_named_with_its_path_and_what_is_allowed(
    config_file: Path, override: str, sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(config_file, [override])
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_agent_is_a_function_or_a_command(config_file: Path) -> None:
    assert load_config(config_file, ["environment.agent=a.b:c"]).environment.agent == "a.b:c"
    command = ["environment.agent.command=[claude, -p]", "environment.agent.answer=file:out/a.txt"]
    config = load_config(config_file, command)
    agent = Command(command=("claude", "-p"), answer="file:out/a.txt")
    assert config.environment.agent == agent
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    changed = {"environment": {"agent": {"command": ["codex"]}}}
    base = config.model_dump(mode="json", include={"environment"})
    assert merge_sections(base, changed)["environment"]["agent"]["answer"] == "file:out/a.txt"
    default = RunConfig().environment
    assert list(find_differences(default, config.environment)) == [("agent", default.agent, agent)]


@pytest.mark.parametrize(
    ("workers", "min_workers", "refused"),
    [(6, None, "workers"), (8, 6, "min_workers"), (8, 4, None), (4, None, None)],
)
def test_gangs_are_multiples_of_the_ranks_that_hold_a_policy_together(
    workers: int, min_workers: int | None, refused: str | None
) -> None:
    train = {"workers": workers, "min_workers": min_workers, "backend": "megatron"}
    config = {"train": train | {"tensor_parallel": 2, "pipeline_parallel": 2}}
    if refused is None:
        RunConfig.model_validate(config)
        return
    with pytest.raises(ValidationError) as error:
        RunConfig.model_validate(config)
    of = "must be a multiple of train.tensor_parallel (2) times train.pipeline_parallel (2)"
    assert f"train.{refused} (6) {of}" in str(error.value)


@pytest.mark.parametrize(
    ("pipeline", "overlap", "allowed"),
    [
        ("disaggregated", "true", "pipeline disaggregated requires rollout.overlap: false"),
        ("async", "false", "pipeline async requires rollout.overlap: true"),
        ("multiplexed", "false", "pipeline multiplexed requires rollout.overlap: true"),
    ],
)
def test_a_pipeline_and_an_overlap_that_contradict_it_are_refused(
    config_file: Path, pipeline: str, overlap: str, allowed: str
) -> None:
    with pytest.raises(ConfigError, match=f"{allowed}; leave one of the two out"):
        load_config(config_file, [f"pipeline={pipeline}", f"rollout.overlap={overlap}"])


def test_overlap_is_the_pipelines_where_the_user_says_nothing(config_file: Path) -> None:
    for pipeline, overlap, lag in (
        ("colocated", False, 0),
        ("disaggregated", False, 0),
        ("async", True, 2),
        ("multiplexed", True, 2),
        ("null", True, 2),
    ):
        config = load_config(config_file, [f"pipeline={pipeline}", "rollout.max_lag=2"])
        assert (config.overlap, config.lag_bound) == (overlap, lag)
    assert load_config(config_file, ["pipeline=colocated", "rollout.overlap=true"]).overlap


FLOATS = [
    (section, name)
    for section in Settings.__subclasses__()
    for name, field in section.model_fields.items()
    if re.search(r"\bfloat\b", str(field.annotation))
]


@pytest.mark.parametrize(("section", "name"), FLOATS, ids=lambda part: getattr(part, "__name__", part))
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, "Infinity"])
def test_no_setting_takes_what_json_cannot_keep(section: type[Settings], name: str, value: Any) -> None:
    annotation = str(section.model_fields[name].annotation)
    given = (value, value) if "tuple" in annotation else {"a": value} if "dict" in annotation else value
    with pytest.raises(ValidationError) as refused:
        section.model_validate({name: given})
    faults = [error["type"] for error in refused.value.errors() if error["loc"][0] == name]
    assert set(faults) == {"finite_number"}


def test_an_address_with_a_password_is_refused_and_not_repeated(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataplane\.url: .* SF_DATAPLANE_URL$") as refused:
        load_config(config_file, ["dataplane.url=https://me:secret@planes.example:8700/a"])
    assert "secret" not in str(refused.value)
    address = "https://planes.example:8700/a"
    assert load_config(config_file, [f"dataplane.url={address}"]).dataplane.url == address


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml: no such file"):
        load_config(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "sentence"), [("a: [1", "not valid YAML"), ("- 1", "expected a mapping of settings, got list")]
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=sentence):
        load_config(path)


def test_every_setting_is_described_for_the_form() -> None:
    schema = RunConfig.model_json_schema()
    sections = [schema, *schema["$defs"].values()]
    undescribed = [
        f"{section['title']}.{name}"
        for section in sections
        for name, field in section["properties"].items()
        # a kind is described as a whole
        if "description" not in field and "$ref" not in field and name != "kind"
    ]
    assert undescribed == []


def test_the_shipped_configurations_are_valid() -> None:
    for path in Path("configs").glob("*.yaml"):
        load_config(path)


DEPLOYED = {"policy": {"warmstart": {"steps": 250}}, "train": {"iterations": 40, "betas": [0.8, 0.9]}}


def test_what_is_given_counts_over_what_is_deployed_setting_by_setting() -> None:
    given = {"run_id": "r", "train": {"iterations": 12}, "rollout": {"max_tokens": 24}}
    merged = merge_sections(DEPLOYED, given)
    assert merged == {
        "run_id": "r",
        "policy": {"warmstart": {"steps": 250}},
        "train": {"iterations": 12, "betas": [0.8, 0.9]},
        "rollout": {"max_tokens": 24},
    }
    assert merge_sections(DEPLOYED, {}) == DEPLOYED
    assert merge_sections({}, given) == given
    assert merge_sections(DEPLOYED, {"policy": {"warmstart": None}})["policy"] == {"warmstart": None}
    assert sorted(describe_differences(DEPLOYED, merged)) == [
        "rollout.max_tokens 24 (deployed: None)",
        "run_id 'r' (deployed: None)",
        "train.iterations 12 (deployed: 40)",
    ]


def test_a_form_that_sends_all_settings_overrides_all_that_are_deployed() -> None:
    form = RunConfig().model_dump(mode="json")
    assert merge_sections(DEPLOYED, form) == form
    assert sorted(describe_differences(DEPLOYED, form)) == [
        "policy.warmstart.steps None (deployed: 250)",
        "train.betas [0.9, 0.95] (deployed: [0.8, 0.9])",
    ]
    assert describe_differences(form, form) == []


def test_what_the_user_names_and_lists_are_given_as_a_whole() -> None:
    deployed = {"cluster": {"workers": {"r0": {"tags": ["rollout"]}}, "prefer": {"train": ["h800"]}}}
    given = {"cluster": {"workers": {"w": {"tags": ["train"]}}}}
    assert merge_sections(deployed, given)["cluster"] == deployed["cluster"] | given["cluster"]
    wrong = {"trian": {"iterations": 1}, "train": {"rate": 1}}
    assert merge_sections(DEPLOYED, wrong)["trian"] == {"iterations": 1}
    with pytest.raises(ConfigError, match=r"train\.rate: unknown key; .*; trian: unknown key"):
        validate_config(merge_sections(DEPLOYED, wrong))


def test_the_real_model_is_trained_with_an_adapter_as_without_but_for_its_rate() -> None:
    whole = load_config("smollm2")
    adapter = load_config("smollm2-lora")
    assert whole.train.learning_rate is not None and adapter.train.lora is not None
    assert adapter.train.learning_rate == pytest.approx(10 * whole.train.learning_rate)
    assert {key for key, _, _ in find_differences(whole, adapter)} == {
        "train.lora",
        "train.learning_rate",
        # small ones, which need not be rare
        "train.checkpoint_every",
        "train.keep_checkpoints",
    }
