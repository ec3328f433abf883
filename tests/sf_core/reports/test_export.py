"""Output of `sf export` is read back by the tools that it is for, or by the rules of their readers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pyarrow.parquet as pq
import pytest
from datasets import load_dataset

from sf_core.reports.export.export import export
from storage import files
from storage.media import ImageSpan
from storage.run_directory import RunDirectory
from storage.tables.schema import Trajectory
from storage.tables.trajectories import write_trajectories
from tests.bench import runs
from tests.bench.commands import sf

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "What is 2+2 and 3+3? \N{GREEK SMALL LETTER PI}"}
ANSWER = {"role": "assistant", "content": "4 and 6"}
THOUGHT = ANSWER | {"reasoning_content": "easy"}


def call(number: int, **arguments: Any) -> dict[str, Any]:
    function = {"name": "calc", "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [call(0, expression="2+2"), call(1, places=[1, 2], exact=True)],
    "unparsed_calls": 1,
}
RESULTS = [{"role": "tool", "content": text, "tool_call_id": f"call_{i}"} for i, text in enumerate("46")]
TOOL_USE = [SYSTEM, USER, CALLS, *RESULTS, ANSWER]
FOLLOW_UP = [USER, ANSWER, {"role": "user", "content": "sure?"}, THOUGHT]


@pytest.fixture
def sampled_run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(str(tmp_path / "run-1"))
    runs.configure(run)
    runs.sample(run, 0, [runs.conversation(TOOL_USE)])
    # the first answer was given, not sampled
    runs.sample(run, 1, [runs.conversation(FOLLOW_UP, given=2, session_id="s1", reward=1.0)])
    return run


def written(uri: str, to: str, out: str) -> tuple[int, dict[str, int]]:
    exported = export(uri, to, out)
    return exported.rows, dict(exported.left_out)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without_nulls(value: Any) -> Any:
    """Parquet fills every mapping with the keys of all rows."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def test_trl_gets_prompts_and_what_the_policy_made_of_them(sampled_run: RunDirectory, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert written(sampled_run.uri, "trl", str(out)) == (2, {})
    first, second = lines(out)
    calls = {key: value for key, value in CALLS.items() if key != "unparsed_calls"}
    assert (first["prompt"], first["completion"]) == ([SYSTEM, USER], [calls, *RESULTS, ANSWER])
    assert (second["prompt"], second["completion"]) == (FOLLOW_UP[:3], [THOUGHT])
    assert [row["reward"] for row in (first, second)] == [0.5, 1.0]
    assert second["session_id"] == "s1" and second["iteration"] == 1


def test_datasets_reads_trl_rows_as_they_were_written(sampled_run: RunDirectory, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    export(sampled_run.uri, "trl", str(out))
    loaded = load_dataset("json", data_files=str(out), split="train", cache_dir=str(tmp_path / "cache"))
    assert set(loaded.column_names) >= {"prompt", "completion", "reward"}
    assert loaded.to_list() == lines(out)


def test_verl_gets_messages_with_what_to_train(sampled_run: RunDirectory, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    assert written(sampled_run.uri, "verl", str(out)) == (2, {})
    # as MultiTurnSFTDataset opens it
    frame = pd.read_parquet(out, dtype_backend="pyarrow")
    first, second = (without_nulls(row) for row in frame["messages"].tolist())
    flags = [message.pop("trainable", None) for message in first]
    assert flags == [None, None, True, None, None, True]
    arguments = [json.loads(call["function"].pop("arguments")) for call in first[2]["tool_calls"]]
    assert arguments == [call["function"]["arguments"] for call in CALLS["tool_calls"]]  # type: ignore[index]
    assert [message["content"] for message in first] == [message["content"] for message in TOOL_USE]
    assert [message.get("trainable") for message in second] == [None, False, None, True]
    assert second[3]["reasoning_content"] == "easy"
    assert frame["data_source"].tolist() == ["calculator", "calculator"]
    assert [row["reward"] for row in frame["extra_info"].tolist()] == [0.5, 1.0]


def test_sharegpt_speakers_take_turns(sampled_run: RunDirectory, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert written(sampled_run.uri, "sharegpt", str(out)) == (2, {})
    first, second = lines(out)
    assert first["system"] == "be brief" and second["system"] == ""
    speakers = [turn["from"] for turn in first["conversations"]]
    assert speakers == ["human", "function_call", "observation", "gpt"]
    human, calls, results, answer = (turn["value"] for turn in first["conversations"])
    assert (human, answer) == (USER["content"], ANSWER["content"])
    assert json.loads(calls) == [call["function"] for call in CALLS["tool_calls"]]  # type: ignore[index]
    assert results.split("\n</tool_response>\n<tool_response>\n") == ["4", "6"]
    assert second["conversations"][-1] == {"from": "gpt", "value": "<think>\neasy\n</think>\n\n4 and 6"}


def documents(folder: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in folder.iterdir()}


def test_atif_has_a_document_per_session_with_calls_and_results_in_one_step(
    sampled_run: RunDirectory, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert written(sampled_run.uri, "atif", str(out)) == (2, {})
    first, second = (documents(out)[name] for name in ("s0.json", "s1.json"))
    assert (first["schema_version"], first["session_id"], first["trajectory_id"]) == (
        "ATIF-v1.7",
        "s0",
        "s0.b0",
    )
    assert first["agent"]["model_name"] == "policy" and first["extra"]["reward"] == 0.5
    steps = first["steps"]
    assert [step["step_id"] for step in steps] == [1, 2, 3, 4]
    assert [step["source"] for step in steps] == ["system", "user", "agent", "agent"]
    assert [step["message"] for step in steps] == [SYSTEM["content"], USER["content"], "", ANSWER["content"]]
    made = [(call["tool_call_id"], call["arguments"]) for call in steps[2]["tool_calls"]]
    assert made == [("call_0", {"expression": "2+2"}), ("call_1", {"places": [1, 2], "exact": True})]
    results = steps[2]["observation"]["results"]
    assert [(one["source_call_id"], one["content"]) for one in results] == [("call_0", "4"), ("call_1", "6")]
    # the first answer was given
    assert [step.get("is_copied_context") for step in second["steps"]] == [None, True, None, None]
    assert second["steps"][3]["reasoning_content"] == "easy" and "metrics" not in second["steps"][1]


def test_atif_has_the_tokens_of_the_rows_bit_for_bit_and_each_sampled_one_once(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run-2"))
    runs.configure(run)
    logprobs = np.random.default_rng(0).normal(size=6).astype(np.float32)
    first = runs.conversation([USER, ANSWER], token_ids=np.array([7, 8], np.int32))
    longer = {"token_ids": np.array([7, 8, 9, 10], np.int32), "shared_prefix": 2, "branch_id": "s0.b1"}
    second = runs.conversation(FOLLOW_UP, parent_branch_id="s0.b0", **longer)
    rows = [
        replace(row, logprobs=np.where(row.logprobs == -1, logprobs[: len(row.token_ids)], row.logprobs))
        for row in (first, second)
    ]
    runs.sample(run, 0, rows)
    export(run.uri, "atif", str(tmp_path / "out"))
    [document] = documents(tmp_path / "out").values()
    [branch] = document.pop("subagent_trajectories")
    assert (branch["session_id"], branch["trajectory_id"]) == ("s0", "s0.b1")
    assert branch["extra"]["parent_branch_id"] == "s0.b0"
    trained = []
    for one, row in zip((document, branch), rows, strict=True):
        told = [step["metrics"] for step in one["steps"] if "metrics" in step]
        assert told[-1]["prompt_token_ids"] + told[-1]["completion_token_ids"] == row.token_ids.tolist()
        at = [len(metrics["prompt_token_ids"]) for metrics in told]
        assert np.array(told[-1]["logprobs"], np.float32).tobytes() == row.logprobs[at[-1] :].tobytes()
        assert [metrics["extra"]["policy_versions"] for metrics in told] == [[0]]
        trained += at
    assert trained == [1, 3]


@pytest.mark.parametrize(("to", "ending"), [("trl", "jsonl"), ("verl", "parquet"), ("sharegpt", "jsonl")])
def test_a_session_that_failed_is_told_from_one_that_finished(tmp_path: Path, to: str, ending: str) -> None:
    run = RunDirectory(str(tmp_path / "run-2"))
    runs.configure(run)
    failed = runs.conversation([USER, ANSWER], session_id="s1", status="timeout", reward=0.0)
    runs.sample(run, 0, [runs.conversation([USER, ANSWER]), failed])
    out = tmp_path / f"out.{ending}"
    export(run.uri, to, str(out))
    facts = pd.read_parquet(out)["extra_info"].tolist() if to == "verl" else lines(out)
    assert [(row["reward"], row["status"]) for row in facts] == [(0.5, "finished"), (0.0, "timeout")]


def test_what_a_format_cannot_hold_is_left_out_and_counted(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run-2"))
    runs.configure(run)
    twice = runs.conversation([USER, ANSWER, ANSWER])
    unprompted = runs.conversation([ANSWER], given=0)
    runs.sample(run, 0, [twice, unprompted])
    assert written(run.uri, "sharegpt", str(tmp_path / "a.jsonl")) == (0, {"speakers do not take turns": 2})
    assert written(run.uri, "trl", str(tmp_path / "b.jsonl")) == (1, {"no prompt before a sampled answer": 1})
    assert written(run.uri, "verl", str(tmp_path / "c.parquet")) == (2, {})


EXAMPLE = [{"role": "user", "content": "ex"}, ANSWER | {"content": "given"}]


def with_one_turn(row: Trajectory, start: int, end: int) -> Trajectory:
    """Row with these turns merged into one, which has the role of the last."""
    merged = row.turns[end - 1]._replace(start=row.turns[start].start)
    return replace(row, turns=[*row.turns[:start], merged, *row.turns[end:]])


def trainable(run: RunDirectory, out: Path) -> list[list[bool]]:
    """`trainable` of every row's assistant messages."""
    export(run.uri, "verl", str(out))
    rows = pd.read_parquet(out)["messages"].tolist()
    return [[bool(m["trainable"]) for m in row if m["role"] == "assistant"] for row in rows]


def test_given_answers_stay_given_where_tool_results_share_an_end(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run-2"))
    runs.configure(run)
    messages = [*EXAMPLE, USER, CALLS, *RESULTS, ANSWER]
    runs.sample(run, 0, [with_one_turn(runs.conversation(messages, given=2), 4, 6)])
    assert trainable(run, tmp_path / "out.parquet") == [[False, True, True]]
    export(run.uri, "trl", str(tmp_path / "out.jsonl"))
    assert lines(tmp_path / "out.jsonl")[0]["prompt"] == [*EXAMPLE, USER]


def test_an_answer_is_trained_in_one_branch_only(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run-2"))
    runs.configure(run)
    branch = runs.conversation(FOLLOW_UP, branch_id="s0.b1", parent_branch_id="s0.b0", shared_prefix=2)
    runs.sample(run, 0, [runs.conversation([USER, ANSWER]), branch])
    assert trainable(run, tmp_path / "out.parquet") == [[True], [False, True]]
    export(run.uri, "trl", str(tmp_path / "out.jsonl"))
    assert lines(tmp_path / "out.jsonl")[1]["completion"] == [THOUGHT]


def test_a_branch_is_left_out_if_its_sampled_answers_cannot_be_told(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run-2"))
    runs.configure(run)
    # a fork inside the prompt: the given answer is in a turn with the messages around it
    forked = with_one_turn(runs.conversation([*EXAMPLE, USER, CALLS, *RESULTS, ANSWER], given=2), 0, 3)
    # the only one that was sampled is the last
    last = with_one_turn(runs.conversation([*EXAMPLE, USER, ANSWER], given=2), 0, 3)
    runs.sample(run, 0, [forked, last])
    assert trainable(run, tmp_path / "out.parquet") == [[False, True]]
    code, output = sf("export", run.uri, "--to", "trl", str(tmp_path / "out.jsonl"))
    assert (code, "1 left out: it is unknown which answers were sampled" in output) == (0, True)
    # this format says nothing of it
    assert export(run.uri, "sharegpt", str(tmp_path / "all.jsonl")).rows == 2


def test_sessions_that_agents_opened_are_written_when_asked_for(
    sampled_run: RunDirectory, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="no opened sessions have finished yet"):
        export(sampled_run.uri, "trl", str(tmp_path / "none.jsonl"), opened=True)
    for version in (9, 10):
        row = runs.conversation([USER, ANSWER], session_id=f"run-1.open.{version}")
        write_trajectories(sampled_run, version, [row], row.session_id, "opened")
    code, output = sf("export", sampled_run.uri, "--to", "trl", "--opened", str(tmp_path / "out.jsonl"))
    assert (code, "2 conversations for trl; 0 left out" in output) == (0, True)
    assert [row["session_id"] for row in lines(tmp_path / "out.jsonl")] == ["run-1.open.9", "run-1.open.10"]


def test_a_folder_of_recorded_sessions_needs_no_run(tmp_path: Path) -> None:
    row = runs.conversation([USER, ANSWER], session_id="recorded.open.1")
    write_trajectories(RunDirectory(str(tmp_path / "recorded")), 3, [row], row.session_id, "opened")
    exported = export(str(tmp_path / "recorded"), "trl", str(tmp_path / "out.jsonl"), opened=True)
    assert (exported.rows, exported.unchecked) == (1, "run recorded has no tokenizer")
    with pytest.raises(ValueError, match="no run here"):
        export(str(tmp_path / "recorded"), "trl", str(tmp_path / "more.jsonl"))


def test_the_command_says_what_it_wrote(sampled_run: RunDirectory, tmp_path: Path) -> None:
    code, output = sf("export", sampled_run.uri, "--to", "trl", str(tmp_path / "out.jsonl"))
    assert code == 0
    assert "out.jsonl: 2 conversations for trl; 0 left out" in output


@pytest.mark.parametrize(
    ("to", "out", "sentence"),
    [
        ("verl", "out.jsonl", "out.jsonl: the name of a file for verl must end in .parquet"),
        ("trl", "taken.jsonl", "taken.jsonl already exists; choose another name or remove it"),
        ("trl", "file/out.jsonl", "create this folder first"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(
    sampled_run: RunDirectory, tmp_path: Path, to: str, out: str, sentence: str
) -> None:
    (tmp_path / "taken.jsonl").write_text("mine", encoding="utf-8")
    (tmp_path / "file").write_text("", encoding="utf-8")
    code, output = sf("export", sampled_run.uri, "--to", to, str(tmp_path / out))
    assert code == 2
    assert sentence in output
    assert (tmp_path / "taken.jsonl").read_text(encoding="utf-8") == "mine"


def test_a_run_without_trajectories_is_named(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "young"))
    runs.configure(run)
    code, output = sf("export", run.uri, "--to", "trl", str(tmp_path / "out.jsonl"))
    assert code == 2 and "young: no trajectories are committed yet" in output


def test_a_part_is_read_and_written_some_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sf_core.reports.export.conversations.MAX_ROWS", 2)
    run = RunDirectory(str(tmp_path / "run-2"))
    runs.configure(run)
    runs.sample(run, 0, [runs.conversation([USER, ANSWER], session_id=f"s{i}") for i in range(5)])
    runs.sample(run, 1, [runs.conversation([USER, ANSWER], session_id="s5")])
    out = tmp_path / "out.parquet"
    assert export(run.uri, "verl", str(out)).rows == 6
    written = pq.ParquetFile(out)
    assert [written.read_row_group(i).num_rows for i in range(written.num_row_groups)] == [2, 2, 1, 1]
    facts = written.read()["extra_info"].to_pylist()
    assert [(row["iteration"], row["session_id"]) for row in facts] == [(i // 5, f"s{i}") for i in range(6)]


@pytest.mark.parametrize(("to", "out"), [("trl", "out.jsonl"), ("atif", "out")])
def test_a_broken_part_leaves_no_file(sampled_run: RunDirectory, tmp_path: Path, to: str, out: str) -> None:
    part = sampled_run.partition("trajectories", 1) + "/rollout-1.parquet"
    files.write_atomic(part, b"PAR1")
    code, output = sf("export", sampled_run.uri, "--to", to, str(tmp_path / out))
    assert code == 2 and "not a complete Parquet file" in output
    assert not (tmp_path / out).exists()


def test_texts_of_one_message_are_joined_and_large_integers_stay(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run-2"))
    runs.configure(run)
    called = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"n": 10**30}}}
    asked = {"role": "user", "content": [{"type": "text", "text": text} for text in ("one", "two")]}
    answer = {"role": "assistant", "content": "", "tool_calls": [called]}
    runs.sample(run, 0, [runs.conversation([SYSTEM, asked, answer])])
    for to, name in (("trl", "out.jsonl"), ("atif", "out")):
        out = tmp_path / name
        assert written(run.uri, to, str(out))[0] == 1
        [path] = [out] if out.is_file() else out.rglob("*.json")
        assert "one\\ntwo" in path.read_text(encoding="utf-8") and str(10**30) in path.read_text(
            encoding="utf-8"
        )


def run_with_images(tmp_path: Path, said: str = "press") -> tuple[RunDirectory, list[str]]:
    """A run of a multimodal policy: an image in the prompt and another in a tool result."""
    run = RunDirectory(str(tmp_path / "run-1"))
    runs.configure(run)
    shown = [{"type": "image", "sha256": letter * 64, "width": 56, "height": 56} for letter in "ab"]
    asked = {"role": "user", "content": [{"type": "text", "text": said}, shown[0]]}
    pressed = {"role": "assistant", "content": "", "tool_calls": [call(0, at="1,2")]}
    result = {"role": "tool", "content": [shown[1]], "tool_call_id": "call_0"}
    spans = [ImageSpan(part["sha256"], at, 1, 56, 56) for part, at in zip(shown, (0, 2), strict=True)]
    runs.sample(run, 0, [runs.conversation([asked, pressed, result, ANSWER], images=spans)])
    return run, [f"{run.media_dir}/{letter * 64}.png" for letter in "ab"]


def test_images_are_parts_and_files_in_trl(tmp_path: Path) -> None:
    run, images = run_with_images(tmp_path)
    out = tmp_path / "out.jsonl"
    export(run.uri, "trl", str(out))
    (row,) = lines(out)
    assert row["images"] == images
    image = {"type": "image", "text": None}
    text = {"type": "text", "text": "press"}
    assert row["prompt"] == [{"role": "user", "content": [text, image]}]
    assert [message["content"] for message in row["completion"]] == [
        [],
        [image],
        [{"type": "text", "text": "4 and 6"}],
    ]
    loaded = load_dataset("json", data_files=str(out), split="train", cache_dir=str(tmp_path / "cache"))
    assert without_nulls(loaded.to_list()) == without_nulls([row])


def test_images_are_marked_in_the_texts_of_verl_and_sharegpt(tmp_path: Path) -> None:
    run, images = run_with_images(tmp_path)
    export(run.uri, "verl", str(tmp_path / "out.parquet"))
    (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert row["images"] == [{"image": file} for file in images]
    assert [message["content"] for message in row["messages"]] == ["press<image>", "", "<image>", "4 and 6"]
    export(run.uri, "sharegpt", str(tmp_path / "out.jsonl"))
    (row,) = lines(tmp_path / "out.jsonl")
    assert row["images"] == images
    assert [turn["value"] for turn in row["conversations"][::2]] == ["press<image>", "<image>"]


@pytest.mark.parametrize(("to", "name"), [("verl", "out.parquet"), ("sharegpt", "out.jsonl")])
def test_texts_that_spell_the_mark_of_images_are_left_out(tmp_path: Path, to: str, name: str) -> None:
    run, _ = run_with_images(tmp_path, "what is an <image>?")
    assert export(run.uri, to, str(tmp_path / name)).left_out == {"a text contains <image>": 1}


def test_images_are_parts_with_files_in_atif(tmp_path: Path) -> None:
    run, images = run_with_images(tmp_path)
    export(run.uri, "atif", str(tmp_path / "out"))
    (file,) = (tmp_path / "out").iterdir()
    first, second, third = json.loads(file.read_text(encoding="utf-8"))["steps"]
    assert first["message"] == [{"type": "text", "text": "press"}, image_of(images[0])]
    assert second["message"] == "" and third["message"] == "4 and 6"
    assert second["observation"]["results"][0]["content"] == [image_of(images[1])]


def image_of(file: str) -> dict[str, Any]:
    return {"type": "image", "source": {"media_type": "image/png", "path": file}}
