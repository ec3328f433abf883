"""Every setting of RunConfig with values that it does not allow, and files and options that are no
configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sf_core.config import RunConfig
from sf_core.config.validation import ConfigError
from sf_core.config.yaml_file import load_config
from tests.bench import refusals
from tests.bench.commands import check_refused

SCHEMA = RunConfig.model_json_schema()


@refusals.refuses("""
    --set rollout.success=answer
    > --set rollout.success: expected a mapping of its settings, got 'answer'
    --set rollout.curriculum=[progress]
    > --set rollout.curriculum: expected a mapping of its settings, got ['progress']
    --set rollout.curriculum.stages={until: 3}
    > --set rollout.curriculum.stages: expected a list, got {'until': 3}
    --set rollout.curriculum.stages=[{shares: {calculator: 0}}]
    > --set rollout.curriculum.stages.0.shares.calculator: input should be greater than 0, got 0
    --set rollout.curriculum.sizes={}
    > --set rollout.curriculum.sizes.fewer: field required
    --set rollout.top_k=2147483648
    > --set rollout.top_k: input should be less than or equal to 2147483647, got 2147483648
    --set rollout.temperature=.nan
    > --set rollout.temperature: input should be a finite number, got nan
    --set rollout.max_tokens=9999
    > run.yaml: rollout.max_tokens (9999) must be less than engine.context_length (512)
    --set rollout.overlap=perhaps
    > --set rollout.overlap: input should be a valid boolean, unable to interpret input, got 'perhaps'
    --set run_id=../etc
    > --set run_id: expected at most 100 letters, digits, `.`, `_` and `-`, the first a letter or digit, got
    > '../etc'
    --set run_id=größe
    > --set run_id: expected at most 100 letters, digits, `.`, `_` and `-`, the first a letter or digit, got
    > 'größe'
    --set train.iterations=1:30
    > --set train.iterations: input should be a valid integer, unable to parse string as an integer, got
    > '1:30'
    --set train.max_grad_norm=.inf
    > --set train.max_grad_norm: input should be a finite number, got inf
    --set train.betas=[.nan, 0.9]
    > --set train.betas.0: input should be a finite number, got nan
    --set train.backend=fsdp
    > --set train.backend: input should be 'torch', 'megatron' or 'emulated', got 'fsdp'
    --set train.pipeline_parallel=2
    > run.yaml: train.tensor_parallel (1) times train.pipeline_parallel (2) needs train.backend megatron;
    > other backends do not split a policy this way
    --set train.min_workers=2
    > run.yaml: train.min_workers (2) must not exceed train.workers (1)
    --set train.minibatches=64
    > run.yaml: train.minibatches (64) must not exceed rollout.groups_per_batch (32)
    --set train.advantage=[1]
    > --set train.advantage: expected the name of a kind, or a mapping of its settings, got [1]
    --set train.loss.policy=gspo
    > --set train.loss.policy.kind: expected one of plain, cispo, m2po, sequence_clip, custom, clip, got
    > 'gspo'
    --set train.loss.policy={kind: cispo, cap: 3}
    > --set train.loss.policy.cap: unknown key; allowed here: kind, high; did you mean
    > train.loss.correction.cap?
    --set train.loss.policy.low=7
    > --set train.loss.policy.low: input should be less than or equal to 1, got 7
    --set train.weights=[fresh, {kind: surprising, share: 2}]
    > --set train.weights.1.share: input should be less than or equal to 1, got 2
    --set train.weights=[{kind: fesh}]
    > --set train.weights.0.kind: expected one of overlong, unparsed, fresh, surprising, entropy_confidence,
    > gated, custom, got 'fesh'
    --set train.select={keep: 3}
    > --set train.select.keep: input should be a multiple of 2, got 3
    --set train.select=extremes
    > --set train.select.keep: field required
    --set train.select={kind: worst, keep: 4}
    > --set train.select.kind: input should be 'extremes', got 'worst'
    --set train.select={keep: 4, best: 1}
    > --set train.select.best: unknown key; allowed here: kind, keep
    --set environment.agent=agent
    > --set environment.agent: expected package.module:name, got 'agent'
    --set environment.agent=[1]
    > --set environment.agent: input should be a valid string, got [1]
    --set environment.agent={command: []}
    > --set environment.agent.command: expected at least 1 item, got []
    --set environment.agent.command=claude -p
    > --set environment.agent.command: expected a list of words such as [claude, -p], got 'claude -p'
    --set environment.agent={command: [a], anser: folder}
    > --set environment.agent.anser: unknown key; allowed here: command, answer, timeout_s, variables,
    > sandbox; did you mean environment.agent.answer?
    --set environment.agent={command: [a], answer: file}
    > --set environment.agent.answer: expected output, folder or file:NAME, got 'file'
    --set environment.agent={command: [a], answer: file:../a}
    > --set environment.agent.answer: expected a file in the command's folder, got 'file:../a'
    --set environment.agent={command: [a], answer: file:/a}
    > --set environment.agent.answer: expected a file in the command's folder, got 'file:/a'
    --set environment.agent={command: [a], variables: {a-b: x}}
    > --set environment.agent.variables.a-b: 'a-b' is not a valid name of an environment variable: use
    > letters, digits and '_'
    --set engine.kind=vlm
    > --set engine.kind: input should be 'torch', 'vllm', 'scripted' or 'emulated', got 'vlm'
    --set engine.kind=scripted
    > run.yaml: engine.script is required with engine.kind: scripted
    --set train.teacher={url: localhost:8000}
    ---
    --set train.teacher={url: http://me:word@host}
    > --set train.teacher.url: expected http://HOST:PORT without a user or password; set a key as an
    > environment variable
    --set engine.vllm.sleep_level=3
    > --set engine.vllm.sleep_level: input should be less than or equal to 2, got 3
    --set pipeline=colocate
    > --set pipeline: input should be 'colocated', 'disaggregated', 'async' or 'multiplexed', got 'colocate'
    --set cluster.workers.r0.tag=x
    > --set cluster.workers.r0.tag: unknown key; allowed here: tags, device, device_kind, threads; did you
    > mean cluster.workers.r0.tags?
    --set cluster.workers.r0.tags=[a b]
    > --set cluster.workers.r0.tags.0: 'a b' is not a valid tag or name: use letters, digits, '.', '_' and '-'
    --set cluster.workers.r0.device_kind=k80
    > --set cluster.workers.r0.device_kind: unknown device kind 'k80'; use one of a100, b200, h100, h20, h200,
    > h800, l4, l40s, mi300x, or measure the device with sf worker --probe
    --set cluster.workers.g0.device=cuda:0
    > --set cluster.workers.g0.tags: field required, because a new name adds a worker; to change an existing
    > worker, use its name: --set cluster.workers.NAME.FIELD=VALUE; to replace all workers, give
    > cluster.workers in a file
    --set dataplane.url=https://me:secret@planes.example:8700/a
    > --set dataplane.url: do not give a user or password here, because this setting is stored with the run
    > and sent to trackers; put the whole address into the environment variable SF_DATAPLANE_URL
    --set policy.model=${NOT_SET}/m
    > --set policy.model: the environment variable NOT_SET is not set
    --set storage.root=$NOT_SET
    > --set storage.root: the environment variable NOT_SET is not set
    --set environment.settings.dataset=${NOT_SET}/d
    > --set environment.settings: dataset: the environment variable NOT_SET is not set
    --set seed
    > --set seed: expected key.path=value
    --set =
    > --set =: expected key.path=value
    --set =1
    > --set =1: expected key.path=value
    --set seed=[1
    > --set seed: '[1' is not a valid YAML value
    --set seed=2026-13-45
    > --set seed: '2026-13-45' is not a valid YAML value
    --set seed=[/red]
    > --set seed: input should be a valid integer, got ['/red']
    seed: 3
    --set seed.x=1
    > --set seed.x=1: seed is a value, not a section
    train: {weights: [fresh]}
    --set train.weights.0.kind=fresh
    > --set train.weights.0.kind=fresh: weights is a list: give the whole list, as --set train.weights=[...]
    rollout: {group_size: 1}
    train: {weights: [overlong, overlong]}
    > run.yaml: train.advantage group compares the sessions of a group, but rollout.group_size is 1: raise
    > rollout.group_size, or use train.advantage whitened; train.weights lists the same kind twice
""")
def test_a_setting_that_is_not_allowed_is_refused_with_its_place(
    refusal: refusals.Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    refusal.check(tmp_path)


@refusals.refuses("""
    train: {learning_rate: 0.001}
    seed: 1
    
    train:
      iterations: 7
    > run.yaml: not valid YAML: the key 'train' is in line 1 and again in line 4: merge the two
    train:
      iterations: 7
      iterations: 8
    > run.yaml: not valid YAML: the key 'iterations' is in line 2 and again in line 3: merge the two
    seed: 1
    'seed': 2
    > run.yaml: not valid YAML: the key 'seed' is in line 1 and again in line 2: merge the two
    seed: 1
    train: [1, }
    > run.yaml: not valid YAML: line 2: while parsing a flow node expected the node content, but found '}'
    a: [1
    > run.yaml: not valid YAML: line 1: while parsing a flow sequence expected ',' or ']', but got '<stream
    > end>'
    - 1
    > run.yaml: expected a mapping of settings, got [1]
    just words
    > run.yaml: expected a mapping of settings, got 'just words'
    seed: 1
    \tx: 2
    > run.yaml: not valid YAML: line 2: while scanning for the next token found character '\\t' that cannot
    > start any token
    a: b: c
    > run.yaml: not valid YAML: line 1: mapping values are not allowed here
    seed: 2026-13-45
    > run.yaml: not valid YAML: month must be in 1..12
    seed: 2026-01-02
    > run.yaml line 1: seed: input should be a valid integer, got 2026-01-02
    seed: !!python/object/apply:os.system [id]
    > run.yaml: not valid YAML: line 1: could not determine a constructor for the tag
    > 'tag:yaml.org,2002:python/object/apply:os.system'
    seed: !!int x
    > run.yaml: not valid YAML: invalid literal for int() with base 10: 'x'
    ? [1, 2]
    : 3
    > run.yaml: (1, 2): keys should be strings, got (1, 2)
    1: 2
    > run.yaml line 1: 1: keys should be strings, got 1
    null: 2
    > run.yaml: None: keys should be strings, got None
    seed: *nowhere
    > run.yaml: not valid YAML: line 1: found undefined alias 'nowhere'
    rollout: &a [*a]
    > run.yaml line 1: rollout: expected a mapping of its settings, got [[[[...]]]]
    seed: '[/red]'
    > run.yaml line 1: seed: input should be a valid integer, unable to parse string as an integer, got
    > '[/red]'
    seed: "two\\nlines"
    > run.yaml line 1: seed: input should be a valid integer, unable to parse string as an integer, got
    > 'two\\nlines'
""")
def test_a_file_that_is_no_configuration_is_refused(refusal: refusals.Refusal, tmp_path: Path) -> None:
    refusal.check(tmp_path)


def settings(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(path of the key, its JSON schema) for sections and values; workers are represented by one."""
    for name, field in schema.get("properties", {}).items():
        key = f"{path}{name}"
        yield key, field
        for part in alternatives(field):
            if (
                "additionalProperties" in part
                and part["additionalProperties"] is not False
                and name == "workers"
            ):
                yield from settings(resolved(part["additionalProperties"]), f"{key}.r0.")
            yield from settings(part, f"{key}.")


def alternatives(field: dict[str, Any]) -> list[dict[str, Any]]:
    """Schemas of a field's alternatives, without null."""
    found = [resolved(part) for part in field.get("anyOf", [field])]
    return [part for part in found if part.get("type") != "null"]


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    return dict(SCHEMA["$defs"][name]) if name else schema


def wrong_values(field: dict[str, Any]) -> Iterator[Any]:
    """A value of another type, and one beyond each bound."""
    for part in alternatives(field):
        yield [1] if part.get("type") in ("object", "boolean") else {"a": 1}
        if (least := part.get("minimum")) is not None:
            yield least - 1
        if (below := part.get("exclusiveMinimum")) is not None:
            yield below
        if (most := part.get("maximum")) is not None:
            yield most + 1
        if (above := part.get("exclusiveMaximum")) is not None:
            yield above
        if "multipleOf" in part:
            yield part["minimum"] + 1
        if part.get("type") == "integer":
            yield 1.5
        if part.get("type") == "number":
            yield "fast"
        if "enum" in part or "pattern" in part:
            yield "no such"
        if part.get("minLength"):
            yield ""
        if part.get("type") == "array":
            yield [] if part.get("minItems") else ["no such"]


WRONG = [(key, value) for key, field in settings(SCHEMA) for value in wrong_values(field)]


def test_every_setting_is_tried() -> None:
    keys = {key for key, _ in WRONG}
    assert len(WRONG) > 150
    assert {"rollout.top_p", "cluster.workers.r0.threads", "policy.warmstart.steps", "track.wandb"} <= keys


def refused(override: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config([], [override])
    return str(raised.value)


@pytest.mark.parametrize(("key", "value"), WRONG, ids=[f"{key}={json.dumps(value)}" for key, value in WRONG])
def test_a_wrong_value_is_refused_with_its_key(key: str, value: Any) -> None:
    refusals.check_sentence(refused(f"{key}={json.dumps(value)}"), "--set ", key)


@pytest.mark.parametrize(
    "section", ["", *(f"{key}." for key, field in settings(SCHEMA) if resolved(field).get("properties"))]
)
def test_an_unknown_key_is_refused_with_those_that_are_allowed(section: str) -> None:
    refusals.check_sentence(refused(f"{section}typo=1"), f"--set {section}typo: unknown key; allowed here: ")


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("rollout.group_siz", "rollout.group_size"),
        ("trian.iterations", "train"),
        ("iterations", "train.iterations"),
        ("train.learningrate", "train.learning_rate"),
        ("train.group_size", "rollout.group_size"),
        ("train.loss.policy.hihg", "train.loss.policy.high"),
        ("environment.setings", "environment.settings"),
    ],
)
def test_what_an_unknown_key_may_mean_is_named(setting: str, meant: str) -> None:
    said = refused(f"{setting}=3")
    assert said.startswith(f"--set {setting.partition('.')[0]}")
    assert said.endswith(f"; did you mean {meant}?")


def test_a_key_that_is_like_no_other_is_refused_without_a_guess() -> None:
    assert "did you mean" not in refused("colour=red")


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe\x00s\x00e",
        b"seed: \x00",
        b"seed: " + b"9" * 5000,
        b"seed: '" + b"x" * 100_000 + b"'",
        b"seed: &a [x, x, x, x, x, x, x, x]\nrun_id: [*a, *a, *a, *a, *a, *a, *a, *a]",
    ],
    ids=lambda text: repr(text[:30]),
)
def test_a_file_that_is_too_large_or_no_text_is_named(tmp_path: Path, text: bytes) -> None:
    (file := tmp_path / "run.yaml").write_bytes(text)
    check_refused(tmp_path, ["train", str(file)], str(file))


def test_an_option_that_is_nested_too_deeply_or_names_nothing_is_refused() -> None:
    refusals.check_sentence(refused("seed=" + "[" * 1000), "--set seed: ")
    refusals.check_sentence(refused("..=1"), "--set ")


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    check_refused(tmp_path, ["train", str(tmp_path)], str(tmp_path))
