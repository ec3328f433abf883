"""Committed trajectories as files that other training tools read: one row per branch.

Owns the three formats. Each holds the conversation as text: exact ids, log-probs and versions are in the
run's own Parquet only. The definitions of the tools an agent was given are in no trajectory: who needs the
column `tools` adds it. Left out are branches that a format cannot hold.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from sf_core.dataplane.messages import Message
from sf_core.report import open_run, parts_of
from storage import files
from storage.trajectories import iter_trajectories, iteration_of

FACTS = ("iteration", "session_id", "branch_id", "group_id", "task_id", "environment", "reward")
"""Columns that every format carries beside the conversation."""

MAX_ROWS = 256
"""Held at once."""


@dataclass(frozen=True, slots=True)
class Exported:
    rows: int
    left_out: Counter[str]
    """Branches, by the reason."""


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: list[Message]
    trained: list[bool] | None
    """Per message: the policy wrote it, and no earlier branch holds it; None if that cannot be told."""
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Format:
    ending: str
    convert: Callable[[Conversation], dict[str, Any] | str]
    """A row, or why the format cannot hold it."""
    write: Callable[[str, Iterable[list[dict[str, Any]]]], None]
    """(URI, some rows after the other)"""


def export(run_uri: str, format_name: str, out: str, *, opened: bool = False) -> Exported:
    """What was sampled for iterations, or the sessions that agents opened. Raises ValueError with one
    sentence: no run, nothing there, unknown format, wrong or taken name."""
    kind = FORMATS.get(format_name)
    if kind is None:
        raise ValueError(f"{format_name}: no such format; there are {', '.join(FORMATS)}")
    if not out.endswith(kind.ending):
        raise ValueError(
            f"{out}: {format_name} reads files whose names end in {kind.ending}; choose such a name"
        )
    run = open_run(run_uri)
    if files.exists(out):
        raise ValueError(f"{out}: is there already; choose another name or remove it")
    parts = parts_of(run, "opened at version" if opened else "trains iteration")
    if not parts:
        what = "opened sessions have finished" if opened else "trajectories are committed"
        raise ValueError(f"{run.run_id}: no {what} yet")
    num_rows, left_out = 0, Counter[str]()

    def rows() -> Iterator[list[dict[str, Any]]]:
        nonlocal num_rows
        for conversations in itertools.chain.from_iterable(map(_conversations, parts)):
            converted = [kind.convert(one) for one in conversations]
            kept = [row for row in converted if not isinstance(row, str)]
            num_rows += len(kept)
            left_out.update(reason for reason in converted if isinstance(reason, str))
            yield kept

    kind.write(out, rows())
    return Exported(num_rows, left_out)


def _conversations(uri: str) -> Iterator[list[Conversation]]:
    iteration = iteration_of(uri)
    # it is in no file
    columns = [name for name in FACTS if name != "iteration"] + ["shared_prefix", "messages", "turns"]
    for batch in iter_trajectories(uri, MAX_ROWS, columns):
        yield [_conversation(row | {"iteration": iteration}) for row in batch.to_pylist()]


def _conversation(row: dict[str, Any]) -> Conversation:
    messages = json.loads(row["messages"])
    facts = {name: row[name] for name in FACTS}
    return Conversation(messages, _trained(messages, row["turns"], row["shared_prefix"]), facts)


def _trained(
    messages: Sequence[Message], turns: Sequence[dict[str, Any]], shared_prefix: int
) -> list[bool] | None:
    """A turn may stand for several messages, of tool results that share one end or of a prompt that is shared
    in part; answers among them were given, or written anew by the template, and are no turn of their own."""
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    written = [turn for turn in turns if turn["role"] == "assistant"]
    own = [turn["engine"] is not None and turn["end"] > shared_prefix for turn in written]
    if len(places) != len(written):
        if sum(own) != 1 or not own[-1]:
            return None
        # a branch ends with what was sampled last
        places, own = places[-1:], own[-1:]
    trained = [False] * len(messages)
    for place, is_own in zip(places, own, strict=True):
        trained[place] = is_own
    return trained


_UNTOLD = "which answers were sampled cannot be told"


def _trl(conversation: Conversation) -> dict[str, Any] | str:
    """TRL's conversational prompt-completion type: messages up to the first that is trained, and from it on;
    huggingface.co/docs/trl/dataset_formats (docs/source/dataset_formats.md of huggingface/trl)."""
    if conversation.trained is None:
        return _UNTOLD
    first = conversation.trained.index(True) if True in conversation.trained else 0
    if not first:
        return "no prompt before a sampled answer"
    messages = [_without(message, "unparsed_calls") for message in conversation.messages]
    return {"prompt": messages[:first], "completion": messages[first:], **conversation.facts}


def _verl(conversation: Conversation) -> dict[str, Any] | str:
    """verl's MultiTurnSFTDataset (verl/utils/dataset/multiturn_sft_dataset.py of verl-project/verl): Parquet
    with a list of messages; `trainable` false keeps an assistant message out of the loss. Parquet has one
    type per field: arguments of tool calls are JSON strings, as in OpenAI's API."""
    if conversation.trained is None:
        return _UNTOLD
    if True not in conversation.trained:
        return "no sampled answer"
    messages = [
        {
            **{name: message.get(name) for name in _MESSAGE_TEXTS},
            "tool_calls": [_call_with_text(call) for call in message.get("tool_calls", [])] or None,
            "trainable": trained if message["role"] == "assistant" else None,
        }
        for message, trained in zip(conversation.messages, conversation.trained, strict=True)
    ]
    facts = conversation.facts
    return {"messages": messages, "data_source": facts["environment"], "extra_info": facts}


def _sharegpt(conversation: Conversation) -> dict[str, Any] | str:
    """ShareGPT as LLaMA-Factory reads it (SharegptDatasetConverter and OpenAIDatasetConverter of
    src/llamafactory/data/converter.py in hiyouga/LlamaFactory): from human or observation, then from gpt or
    function_call, strictly in turn. Messages of one side that follow each other become one; text beside a
    call is left out, as there."""
    messages = conversation.messages
    system = [message["content"] for message in messages if message["role"] == "system"]
    turns: list[dict[str, str]] = []
    for message in messages:
        if message["role"] == "system":
            continue
        speaker, value = _said(message)
        if turns and turns[-1]["from"] == speaker and speaker in _JOINTS:
            turns[-1]["value"] += _JOINTS[speaker] + value
        else:
            turns.append({"from": speaker, "value": value})
    sides = [turn["from"] in _JOINTS for turn in turns]
    if not turns or len(turns) % 2 or sides != [True, False] * (len(turns) // 2):
        return "speakers do not take turns"
    return {"conversations": turns, "system": "\n".join(system), **conversation.facts}


_JOINTS = {"human": "\n", "observation": "\n</tool_response>\n<tool_response>\n"}
"""Between messages of one speaker; those of the other side, the policy's, are never joined."""


def _said(message: Message) -> tuple[str, str]:
    if message["role"] == "tool":
        return "observation", message["content"]
    if message["role"] != "assistant":
        return "human", message["content"]
    thought = message.get("reasoning_content")
    prefix = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    if calls := message.get("tool_calls"):
        return "function_call", prefix + json.dumps([call["function"] for call in calls], ensure_ascii=False)
    return "gpt", prefix + message["content"]


def _without(message: Message, name: str) -> Message:
    return {key: value for key, value in message.items() if key != name}


def _call_with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


def _write_lines(uri: str, parts: Iterable[Sequence[dict[str, Any]]]) -> None:
    with files.writer(uri) as file:
        for rows in parts:
            file.write(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))


_CALL = pa.struct(
    [
        ("id", pa.string()),
        ("type", pa.string()),
        ("function", pa.struct([("name", pa.string()), ("arguments", pa.string())])),
    ]
)
_MESSAGE_TEXTS = ("role", "content", "reasoning_content", "tool_call_id", "name")
_MESSAGE = pa.struct(
    [
        *((name, pa.string()) for name in _MESSAGE_TEXTS),
        ("tool_calls", pa.list_(_CALL)),
        ("trainable", pa.bool_()),
    ]
)
_TYPES = {"iteration": pa.int32(), "reward": pa.float64()}
_VERL_SCHEMA = pa.schema(
    [
        ("messages", pa.list_(_MESSAGE)),
        ("data_source", pa.string()),
        ("extra_info", pa.struct([(name, _TYPES.get(name, pa.string())) for name in FACTS])),
    ]
)


def _write_verl(uri: str, parts: Iterable[list[dict[str, Any]]]) -> None:
    with files.writer(uri) as file, pq.ParquetWriter(file, _VERL_SCHEMA, compression="zstd") as writer:
        for rows in parts:
            writer.write_table(pa.Table.from_pylist(rows, _VERL_SCHEMA))


FORMATS = {
    "trl": Format(".jsonl", _trl, _write_lines),
    "verl": Format(".parquet", _verl, _write_verl),
    "sharegpt": Format(".jsonl", _sharegpt, _write_lines),
}
