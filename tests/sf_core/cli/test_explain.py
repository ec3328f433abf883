"""`sf plan`: its output for each pipeline, and for plans that could not start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from sf_core.cli.main import app

OTHERS = {"a0": {"tags": ["agent"]}, "c0": {"tags": ["cpu"]}}
R0 = {"tags": ["rollout"]}
BOTH = {"tags": ["rollout", "train"]}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "240")

    def write(devices: dict[str, Any], **settings: Any) -> str:
        file = tmp_path / "run.yaml"
        cluster = {"workers": devices | OTHERS, **settings.pop("cluster", {})}
        file.write_text(
            yaml.safe_dump(
                {**settings, "cluster": cluster, "storage": {"root": str(tmp_path / "runs")}}, sort_keys=False
            ),
            encoding="utf-8",
        )
        return str(file)

    return write


def sf_plan(*arguments: str) -> tuple[int, dict[str, str]]:
    """Exit code of `sf plan`, and its lines by their first word."""
    result = CliRunner().invoke(app, ["plan", *arguments])
    lines = [" ".join(line.split()).partition(" ") for line in result.output.splitlines()]
    return result.exit_code, {first: rest for first, _, rest in lines}


@pytest.mark.parametrize(
    ("devices", "settings", "said"),
    [
        (
            {"d0": BOTH, "d1": BOTH},
            {"pipeline": "colocated", "train": {"workers": 2}},
            {
                "pipeline": "colocated; d0, d1: train steps and rollout in turn",
                "lag": "bound 0: every token is trained on by the version that sampled it",
                "d0": "rollout train trains as rank 0, rolls out between steps: no other worker can train",
                "d1": "rollout train trains as rank 1, rolls out between steps: no other worker can train",
            },
        ),
        (
            {"r0": R0, "t0": BOTH},
            {"rollout": {"groups_per_batch": 4, "outside_groups": 3}},
            {
                "outside": "3 of 4 groups of each batch come from external agents (POST /runs/RUN/groups)",
            },
        ),
        (
            {"r0": R0, "t0": {"tags": ["train"]}},
            {"pipeline": "disaggregated"},
            {
                "pipeline": "disaggregated; t0: train steps only; r0: rollout",
                "lag": "bound 0: every token is trained on by the version that sampled it",
                "r0": "rollout rolls out: is not tagged train",
                "t0": "train trains as rank 0: no other worker can train",
            },
        ),
        (
            {"r0": R0, "t0": BOTH, "t1": {"tags": ["train"]}},
            {"pipeline": "async"},
            {
                "pipeline": "async; t1: train steps only; r0, t0: rollout, during train steps too",
                "lag": "bound 1: sampling continues during training; "
                "training waits for sessions that would exceed this lag",
                "t0": "rollout train rolls out: others train first",
                "t1": "train trains as rank 0: is not tagged rollout",
            },
        ),
        (
            {"r0": R0, "t0": BOTH, "t1": {"tags": ["train"]}},
            {"pipeline": "multiplexed"},
            {
                "pipeline": "multiplexed; t0: train steps and rollout in turn; "
                "r0: rollout, during train steps too",
                "t0": "rollout train trains as rank 0, rolls out between steps: no other worker can train",
                "t1": "train nothing: not chosen to train, and is not tagged rollout",
            },
        ),
        (
            {"r0": R0, "t0": BOTH | {"device_kind": "h20"}},
            {},
            {
                "pipeline": "multiplexed by tags and rollout.overlap; "
                "t0: train steps and rollout in turn; r0: rollout, during train steps too",
                "a0": "agent runs agents",
                "c0": "cpu filters, publishes, evaluates",
            },
        ),
        (
            {"r0": R0, "t0": BOTH},
            {},
            {
                "pipeline": "async by rollout.overlap; t0 would take cores from r0; "
                "t0: train steps only; r0: rollout, during train steps too",
            },
        ),
    ],
    ids=["colocated", "outside", "disaggregated", "async", "multiplexed", "by-tags", "shared-cores"],
)
def test_every_pipeline_is_put_into_words(
    write: Any, devices: dict[str, Any], settings: dict[str, Any], said: dict[str, str]
) -> None:
    code, lines = sf_plan(write(devices, **settings))
    assert code == 0
    assert {word: lines.get(word) for word in said} == said


def test_known_devices_show_their_figures_and_decide_who_trains(write: Any) -> None:
    devices = {"d0": {**BOTH, "device_kind": "h20"}, "d1": {**BOTH, "device_kind": "H100"}}
    _, lines = sf_plan(write(devices))
    assert lines["d0"] == "rollout train h20: 148 TFLOP/s, 4 TB/s 1.00 rolls out: others train first"
    assert lines["d1"].startswith("rollout train h100: 989 TFLOP/s, 3.35 TB/s 2.31 trains as rank 0,")
    assert lines["d1"].endswith("rolls out between steps: higher train_priority")
    assert "unknown" not in lines


def test_what_decided_and_what_is_not_known_is_said(write: Any) -> None:
    preferred = {"prefer": {"train": ["big"]}}
    _, lines = sf_plan(write({"d0": BOTH, "d1": {"tags": ["rollout", "train", "big"]}}, cluster=preferred))
    assert lines["d1"].endswith("tags of cluster.prefer")
    assert lines["unknown"].startswith("the devices of d1, d0; set device_kind or use sf worker --probe")
    _, lines = sf_plan(write({"d0": BOTH, "d1": BOTH}))
    assert lines["d0"].endswith("first by name")


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ([], "environment"),
        (["--set", "cluster.scheduler=configuration"], "configuration"),
        (["--set", "cluster.scheduler=configuration", "--scheduler", "option"], "option"),
    ],
    ids=["environment", "configuration", "option"],
)
def test_the_plan_is_made_of_the_workers_that_a_run_would_get(
    write: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], asked: str
) -> None:
    monkeypatch.setenv("SF_SCHEDULER", "environment")
    monkeypatch.setattr("sf_core.scheduling.cluster.ANSWER_S", 0.1)
    result = CliRunner().invoke(app, ["plan", write({"r0": R0, "t0": BOTH}), *arguments])
    assert result.output.startswith(f"error: no Dask scheduler answers at {asked}: ")


def test_the_plan_warns_of_a_rate_that_is_far_above_the_derived_one(write: Any, small_policy: str) -> None:
    policy = {"model": small_policy, "dtype": "float32"}
    workers = {"r0": R0, "t0": BOTH}
    code, lines = sf_plan(write(workers, policy=policy, train={"learning_rate": 0.06}))
    assert code == 0
    assert lines["look"].startswith(
        "at this train.learning_rate 0.06 is 200 times the value that would be derived, 0.0003 ("
    )
    code, lines = sf_plan(write(workers, policy=policy))
    assert code == 0 and "look" not in lines


def test_the_plan_says_how_a_policy_sees_images(
    write: Any, small_multimodal_policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SF_VLLM_PYTHON", "/nowhere/python")
    engine = {"kind": "vllm"}
    workers = {"r0": R0, "t0": {"tags": ["train"]}}
    code, lines = sf_plan(write(workers, policy={"sees": True}, engine=engine))
    assert (code, lines["pictures"]) == (0, "the policy sees images")
    rules = {"max_picture_tokens": 64}
    code, lines = sf_plan(
        write(workers, policy={"model": small_multimodal_policy}, engine=engine, rollout=rules)
    )
    assert code == 0
    assert lines["pictures"] == (
        "the policy sees images as 4 to 64 tokens each, one token per 28 by 28 pixels; larger images are "
        "scaled down"
    )


def test_a_plan_is_one_json_document_with_the_figures_of_the_table(write: Any) -> None:
    file = write({"r0": R0, "t0": BOTH}, pipeline="multiplexed", rollout={"temperature": 0.0})
    result = CliRunner().invoke(app, ["plan", file, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["pipeline"], found["lag_bound"]) == ("multiplexed", 1)
    assert (found["trainers"], found["trainers_roll_out"]) == (["t0"], True)
    assert [(worker["name"], worker["tags"]) for worker in found["workers"]] == [
        ("a0", ["agent"]),
        ("c0", ["cpu"]),
        ("r0", ["rollout"]),
        ("t0", ["rollout", "train"]),
    ]
    assert found["workers"][2]["duty"] == "rolls out: is not tagged train"
    sizes = found["bytes"]
    assert sizes["engine_weights"] == 4 * found["parameters"] == sizes["version"]
    assert sizes["disk"] > sizes["checkpoint"] > sizes["version"] and sizes["trainer_peak"] > sizes["trainer"]
    _, lines = sf_plan(file)
    assert " ".join(found["facts"]["disk"].split()) == lines["disk"]
    assert found["concerns"] and found["concerns"][0].split()[0] in lines["look"]


def test_a_plan_whose_sizes_are_unknown_has_none() -> None:
    found = json.loads(CliRunner().invoke(app, ["plan", "emulated", "--json"]).stdout)
    assert (found["parameters"], found["bytes"], found["concerns"]) == (None, None, [])
