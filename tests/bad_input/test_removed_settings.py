"""Settings that earlier versions had: in files that users wrote, and in what earlier versions stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sf_core.config import RunConfig
from sf_core.config.removed import REMOVED
from sf_core.config.validation import ConfigError
from sf_core.config.yaml_file import describe_differences, load_config
from sf_core.stages.preflight.stored_config import read_stored_config
from storage.run_directory import RunDirectory
from tests.bench.runs import configure

USED: dict[str, Any] = {"engine.vllm.url": "http://gpu-host:8000", "cluster.elastic": {"agent": {"max": 3}}}
"""A value with which each of them had an effect."""
SENTENCES = {
    "engine.vllm.url": "engine.vllm.url: this setting was removed; delete it, because each rollout worker "
    "now starts its own vLLM server",
    "cluster.elastic": "cluster.elastic: this setting was removed; delete it, because a run now uses every "
    "connected worker tagged agent or reward all the time",
}


def nested(key: str, value: Any) -> Any:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def test_each_is_tried_here() -> None:
    assert REMOVED.keys() == USED.keys() == SENTENCES.keys()


@pytest.mark.parametrize("key", REMOVED)
def test_its_default_changes_nothing(key: str) -> None:
    stored = nested(key, REMOVED[key].default)
    assert RunConfig.model_validate(stored) == RunConfig()
    assert describe_differences({}, stored) == []
    # Prefect's form and the command line may hold part of a section
    assert RunConfig.model_validate({key.partition(".")[0]: {}}) == RunConfig()


@pytest.mark.parametrize("key", REMOVED)
def test_another_value_in_a_file_is_told_with_its_line(tmp_path: Path, key: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"seed: 3\n{json.dumps(nested(key, USED[key]))[1:-1]}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    assert str(refused.value) == f"{file} line 2: {SENTENCES[key]}"
    with pytest.raises(ConfigError) as refused:
        load_config("quickstart", [f"{key}={json.dumps(USED[key])}"])
    assert str(refused.value) == f"--set {SENTENCES[key]}"


@pytest.mark.parametrize("key", REMOVED)
def test_another_value_in_a_stored_run_is_told_with_its_file(tmp_path: Path, key: str) -> None:
    run = RunDirectory(str(tmp_path / "run"))
    config = configure(run)
    stored = config.model_dump(mode="json")
    *sections, name = key.split(".")
    section = stored
    for part in sections:
        section = section[part]
    file = Path(run.path("config.json"))
    section[name] = REMOVED[key].default
    file.write_text(json.dumps(stored), encoding="utf-8")
    assert run.read_config(RunConfig) == config
    section[name] = USED[key]
    file.write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(ValueError) as refused:
        read_stored_config(run.uri)
    assert str(refused.value) == f"{file}: cannot be read: {SENTENCES[key]}"


def test_all_of_them_are_told_at_once() -> None:
    given: dict[str, Any] = {}
    for key, value in USED.items():
        given |= nested(key, value)
    with pytest.raises(ValidationError) as refused:
        RunConfig.model_validate(given)
    assert [".".join(map(str, fault["loc"])) for fault in refused.value.errors()] == [*USED]
