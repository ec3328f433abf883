"""JSON that is nested too deeply for Python, in each kind of file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from storage.json_files import load_json
from storage.run_directory import RunDirectory
from tests.bench import runs
from tests.bench.commands import check_refused

LEVELS = 100_000
DEEP = b'{"version":"1.0","model":' + b"[" * LEVELS + b"]" * LEVELS + b"}"


@pytest.fixture
def run(tmp_path: Path, model_dir: str) -> RunDirectory:
    made = RunDirectory(str(tmp_path / "runs" / "run-1"))
    runs.configure(made)
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    runs.sample(made, 0, [runs.conversation(turns)])
    shutil.copytree(model_dir, made.start_dir)
    made.write_summary({"iterations": 1})
    return made


@pytest.mark.parametrize("text", [DEEP, DEEP.decode()])
def test_deep_nesting_is_a_wrong_value(text: str | bytes) -> None:
    with pytest.raises(ValueError) as refused:
        load_json(text)
    assert str(refused.value) == "the JSON is nested too deeply"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("start/tokenizer.json", ["inspect", "--session", "s0"]),
        ("start/tokenizer.json", ["report"]),
        ("config.json", ["report"]),
        ("manifests/00000/rollout.json", ["inspect"]),
        ("summary.json", ["gc"]),
        ("summary.json", ["ls"]),
    ],
)
def test_files_of_a_run_are_named(run: RunDirectory, name: str, arguments: list[str]) -> None:
    Path(run.path(name)).write_bytes(DEEP)
    command, *options = arguments
    check_refused(Path(run.uri), [command, run.uri, *options], run.path(name))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_files_of_a_model_are_named(tmp_path: Path, small_policy: str, name: str) -> None:
    shutil.copytree(small_policy, model := tmp_path / "model")
    (model / name).write_bytes(DEEP)
    sentence = check_refused(model, ["model", str(model)], str(model))
    if name != "tokenizer.json":
        assert sentence == f"{model / name} cannot be read: the JSON is nested too deeply\n"


def test_a_configuration_is_named(tmp_path: Path) -> None:
    (file := tmp_path / "run.yaml").write_bytes(DEEP)
    told = f"{file}: not valid YAML: nested too deeply\n"
    assert check_refused(tmp_path, ["train", str(file)]) == told
