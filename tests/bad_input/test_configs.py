"""Every setting of RunConfig with values that it does not allow, and files that are no configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sf_core.config import RunConfig
from tests.bench.commands import check_refused

SCHEMA = RunConfig.model_json_schema()


@pytest.fixture
def run_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text("seed: 3\n", encoding="utf-8")
    return path


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


@pytest.mark.parametrize(("key", "value"), WRONG, ids=[f"{key}={json.dumps(value)}" for key, value in WRONG])
def test_a_wrong_value_is_refused_with_its_key(run_yaml: Path, key: str, value: Any) -> None:
    check_refused(
        run_yaml.parent, ["train", str(run_yaml), "--set", f"{key}={json.dumps(value)}"], "--set ", key
    )


@pytest.mark.parametrize(
    "section", ["", *(f"{key}." for key, field in settings(SCHEMA) if resolved(field).get("properties"))]
)
def test_an_unknown_key_is_refused_with_those_that_are_allowed(run_yaml: Path, section: str) -> None:
    check_refused(
        run_yaml.parent,
        ["train", str(run_yaml), "--set", f"{section}typo=1"],
        f"{section}typo",
        "allowed here: ",
    )


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe\x00s\x00e",
        b"seed: \x00",
        b"seed: [1",
        b"seed: 1\n\tx: 2",
        b"a: b: c",
        b"- 1",
        b"just words",
        b"seed: 2026-13-45",
        b"seed: 2026-01-02",
        b"seed: !!python/object/apply:os.system [id]",
        b"seed: !!int x",
        b"? [1, 2]\n: 3",
        b"1: 2",
        b"null: 2",
        b"seed: *nowhere",
        b"rollout: &a [*a]",
        b"[" * 2000,
        b"seed: " + b"9" * 5000,
        b"seed: '" + b"x" * 100_000 + b"'",
        b"seed: &a [x, x, x, x, x, x, x, x]\nrun_id: [*a, *a, *a, *a, *a, *a, *a, *a]",
        b"seed: '[/red]'",
        b'seed: "two\\nlines"',
    ],
    ids=lambda text: repr(text[:30]),
)
def test_a_file_that_is_no_configuration_is_named(run_yaml: Path, text: bytes) -> None:
    run_yaml.write_bytes(text)
    check_refused(run_yaml.parent, ["train", str(run_yaml)], str(run_yaml))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("", ""),
        ("=", ""),
        ("=1", ""),
        ("seed", "--set seed: expected key.path=value"),
        ("seed.x=1", "--set seed.x=1: seed is a value, not a section"),
        ("seed=[1", "--set seed: '[1' is not a valid YAML value"),
        ("seed=2026-13-45", ""),
        ("seed=[/red]", ""),
        ("..=1", ""),
        ("seed=" + "[" * 2000, ""),
    ],
    ids=lambda text: repr(text[:30]),
)
def test_an_override_that_is_none_is_named(run_yaml: Path, override: str, sentence: str) -> None:
    check_refused(run_yaml.parent, ["train", str(run_yaml), "--set", override], sentence)


def test_a_folder_is_no_configuration(run_yaml: Path) -> None:
    check_refused(run_yaml.parent, ["train", str(run_yaml.parent)], str(run_yaml.parent))
