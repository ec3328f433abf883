"""Exported conversations render to what the policy saw when read like other tools do."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
import pytest
from datasets import load_dataset
from transformers import PreTrainedTokenizerFast

from sf_core.dataplane.chat.messages import Message
from sf_core.dataplane.chat.rendered import PromptChecker
from sf_core.dataplane.chat.tool_formats import ToolCall
from sf_core.reports.export.export import export
from storage.run_directory import RunDirectory
from storage.tables.trajectories import read_trajectories, to_rows
from tests.bench import dataplane, runs
from tests.bench.commands import sf

SYSTEM = {"role": "system", "content": "Be brief. \N{GREEK SMALL LETTER PI}"}
OTHER = dataplane.specs.make_tool("look", "Looks.", where="string")


class Talk:
    """An agent that uses tools, and a policy whose ids are not those that the tokenizer would choose."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.renderer = dataplane.conversations.family(name)
        self.rng = random.Random(0)
        self.record = dataplane.conversations.Record(self.renderer)

    def turns(self, tools: list[dict[str, Any]], question: str, num_calls: int = 1) -> None:
        messages = [SYSTEM, dataplane.conversations.user(question)]
        for x in range(num_calls if tools else 0):
            turn = self._say(
                messages, tools, dataplane.conversations.call_text(self.name, x), ToolCall("find", {"x": x})
            )
            call_id = turn["tool_calls"][0]["id"]
            messages += [turn, {"role": "tool", "content": f"found {x}", "tool_call_id": call_id}]
        messages.append(self._say(messages, tools, "the answer is 12"))
        messages.append(dataplane.conversations.user("sure?"))
        self._say(messages, tools, "yes")

    def _say(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        text: str,
        *calls: ToolCall,
    ) -> dict[str, Any]:
        prompt = self.record.session.open_prompt(messages, tools, self.renderer)
        return self.record.answer(
            prompt, dataplane.conversations.odd_ids(self.renderer, text, self.rng), calls=calls
        ).message

    def store(self, folder: Path) -> RunDirectory:
        run = RunDirectory(str(folder / "run-1"))
        runs.configure(run)
        shutil.copytree(self.renderer.model_dir, run.start_dir)
        runs.sample(run, 0, self.record.export())
        return run


@pytest.fixture(params=["qwen3", "llama3"])
def talk(request: pytest.FixtureRequest) -> Talk:
    return Talk(request.param)


def tokenizer_of(run: RunDirectory) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(run.start_dir)


def seen(run: RunDirectory, tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """Text before the last answer, by branch."""
    [ref] = run.read_manifest(0, "rollout").outputs  # type: ignore[union-attr]
    rows = to_rows(read_trajectories(run.path(ref.uri)))
    return {row.branch_id: str(tokenizer.decode(row.token_ids[: row.turns[-1].start])) for row in rows}


def test_rows_for_trl_render_to_what_the_policy_saw(talk: Talk, tmp_path: Path) -> None:
    talk.turns([dataplane.conversations.FIND], "one tool")
    talk.turns([dataplane.conversations.FIND, OTHER], "two tools", num_calls=2)
    talk.turns([], "no tool")
    run = talk.store(tmp_path)
    tokenizer = tokenizer_of(run)
    exported = export(run.uri, "trl", str(tmp_path / "out.jsonl"))
    files = {"data_files": str(tmp_path / "out.jsonl"), "cache_dir": str(tmp_path / "cache")}
    rows = load_dataset("json", split="train", **files).to_list()
    told = seen(run, tokenizer)
    assert len(rows) == exported.rows == len(told) and exported.unlike == 0
    for row in rows:
        *before, _ = row["prompt"] + row["completion"]
        tools = json.loads(row["tools"]) if row["tools"] else None
        text = tokenizer.apply_chat_template(before, tools, add_generation_prompt=True, tokenize=False)
        assert (row["as_seen"], text) == (True, told[row["branch_id"]])


@pytest.mark.parametrize(("name", "unlike"), [("qwen3", 0), ("llama3", 1)])
def test_rows_for_verl_say_whether_they_render_to_what_the_policy_saw(
    name: str, unlike: int, tmp_path: Path
) -> None:
    """Arguments of calls are texts there; the template of Llama writes them in quotes."""
    talk = Talk(name)
    talk.turns([dataplane.conversations.FIND], "one tool")
    talk.turns([], "no tool")
    run = talk.store(tmp_path)
    tokenizer = tokenizer_of(run)
    exported = export(run.uri, "verl", str(tmp_path / "out.parquet"))
    assert exported.unlike == unlike
    told = seen(run, tokenizer)
    frame = pd.read_parquet(tmp_path / "out.parquet", dtype_backend="pyarrow")
    for messages, tools, facts in zip(frame["messages"], frame["tools"], frame["extra_info"], strict=True):
        tools = None if tools is pd.NA else tools
        *before, _ = messages
        text = tokenizer.apply_chat_template(before, tools, add_generation_prompt=True, tokenize=False)
        assert facts["as_seen"] == (text == told[facts["branch_id"]])


def test_tools_that_parquet_fills_with_nulls_are_told(tmp_path: Path) -> None:
    talk = Talk("qwen3")
    talk.turns([dataplane.conversations.FIND, OTHER], "two tools")
    run = talk.store(tmp_path)
    code, output = sf("export", run.uri, "--to", "verl", str(tmp_path / "out.parquet"))
    assert code == 0
    assert "1 conversations render to other tokens than the policy saw: their as_seen is false" in output
    [tools] = pd.read_parquet(tmp_path / "out.parquet", dtype_backend="pyarrow")["tools"]
    assert tools[0]["function"]["parameters"]["properties"] == {"x": {"type": "integer"}, "where": None}


def test_tools_without_a_type_in_parquet_are_left_out(tmp_path: Path) -> None:
    talk = Talk("qwen3")
    bare = {"type": "function", "function": {"name": "find", "parameters": {"properties": {}}}}
    talk.turns([bare], "an empty mapping")
    talk.turns([], "no tool")
    exported = export(talk.store(tmp_path).uri, "verl", str(tmp_path / "out.parquet"))
    assert (exported.rows, exported.left_out) == (1, {"the tools have no Parquet type": 1})


def test_sharegpt_has_the_tools_as_text(talk: Talk, tmp_path: Path) -> None:
    talk.turns([dataplane.conversations.FIND], "one tool")
    talk.turns([], "no tool")
    export(talk.store(tmp_path).uri, "sharegpt", str(tmp_path / "out.jsonl"))
    first, second = (
        json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    )
    assert (json.loads(first["tools"]), second["tools"]) == ([dataplane.conversations.FIND], "")


def test_rows_that_render_otherwise_are_told_apart(tmp_path: Path) -> None:
    talk = Talk("qwen3")
    talk.turns([dataplane.conversations.FIND], "as it was")
    run = talk.store(tmp_path)
    rows = talk.record.export()
    # ids that no template would make of the messages
    rows[0].token_ids[2] += 1
    runs.sample(run, 1, rows)
    code, output = sf("export", run.uri, "--to", "trl", str(tmp_path / "out.jsonl"))
    assert (code, "1 conversations render to other tokens than the policy saw" in output) == (0, True)
    told = [
        json.loads(line)["as_seen"]
        for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert told == [True, False]


def test_a_forced_beginning_was_seen(tmp_path: Path) -> None:
    talk = Talk("qwen3")
    whole = dataplane.conversations.call_text("qwen3", 1)
    cut = whole.index("find")
    prompt = talk.record.session.open_prompt(
        [dataplane.conversations.user("a")], [dataplane.conversations.FIND], talk.renderer, whole[:cut]
    )
    talk.record.answer(
        prompt,
        talk.renderer.encode(whole[cut:]).tolist(),
        calls=[ToolCall("find", {"x": 1})],
        forced=whole[:cut],
    )
    assert export(talk.store(tmp_path).uri, "trl", str(tmp_path / "out.jsonl")).unlike == 0


def test_without_a_tokenizer_nothing_is_checked(tmp_path: Path) -> None:
    talk = Talk("chatml")
    talk.turns([dataplane.conversations.FIND], "one tool")
    run = talk.store(tmp_path)
    shutil.rmtree(run.start_dir)
    code, output = sf("export", run.uri, "--to", "trl", str(tmp_path / "out.jsonl"))
    assert code == 0
    assert "not compared with the tokens that the policy saw: run run-1 has no tokenizer" in output
    assert json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))["as_seen"] is None


def test_a_rendering_has_one_placeholder_for_each_image(tmp_path: Path) -> None:
    renderer = dataplane.conversations.family("qwen2_5_vl")
    run = RunDirectory(str(tmp_path / "run-1"))
    shutil.copytree(renderer.model_dir, run.start_dir)
    image = {"type": "image", "sha256": "a", "width": 56, "height": 56}
    messages: list[Message] = [{"role": "user", "content": [image, image]}]
    record = dataplane.conversations.Record(renderer)
    seen, spans = record.read(record.session.open_prompt(messages, [], renderer))
    assert [span.length for span in spans] == [4, 4]
    reader = PromptChecker(run)
    answer = {"role": "assistant", "content": "yes"}
    assert reader.matches_prompt([*messages, answer], [], seen)
    assert not reader.matches_prompt([{"role": "user", "content": [image]}, answer], [], seen)
