"""Committed trajectories as files that other training tools read: one row per branch.

Owns the three formats. Each holds the conversation and its tools as text: exact ids, log-probs and versions
are in the run's own Parquet only. Branches that a format cannot hold are left out. Every row says whether it
renders to what the policy saw (sf_core/dataplane/chat/rendered.py).
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Protocol

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sf_core.dataplane.chat.messages import Message
from sf_core.dataplane.chat.rendered import Reader
from sf_core.dataplane.chat.tool_formats import Tool
from sf_core.reports.view import open_run
from storage import files
from storage.parquet import numpy_rows
from storage.run_directory import RunDirectory
from storage.trajectories import iter_trajectories, iteration_of

FACTS = ("iteration", "session_id", "branch_id", "group_id", "task_id", "environment", "reward", "status")
"""Columns of every format beside the conversation."""

MAX_ROWS = 256
"""Number of rows held at once."""


@dataclass(frozen=True, slots=True)
class Exported:
    rows: int
    left_out: Counter[str]
    """Numbers of branches left out, by the reason."""
    unlike: int = 0
    """Number of rows that render to something else than the policy saw."""
    unchecked: str | None = None
    """Why rendering was not checked; None if it was."""


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: list[Message]
    trained: list[bool] | None
    """Whether each message was sampled and is in no earlier branch; None if that cannot be told."""
    tools: str | None
    """Tools as JSON text; None if there are none."""
    seen: np.ndarray
    """Token ids before the last answer."""
    facts: dict[str, Any]


Row = dict[str, Any]
Rendered = tuple[list[Message], list[Tool]]
"""Messages and tools as a reader of the format passes them to a chat template."""


class Format(Protocol):
    ending: str

    def rendered(self, conversation: Conversation) -> Rendered: ...

    def convert(self, conversation: Conversation) -> Row | str:
        """A row, or the reason why the format cannot hold it."""

    def write(self, uri: str, parts: Iterable[list[Row]]) -> None:
        """Write lists of rows one after the other."""


def export(run_uri: str, format_name: str, out: str, *, opened: bool = False) -> Exported:
    """Export the trajectories of iterations, or the sessions that agents opened. Raises ValueError with one
    sentence: no run, nothing to export, unknown format, wrong or taken name."""
    make = FORMATS.get(format_name)
    if make is None:
        raise ValueError(f"{format_name}: no such format; there are {', '.join(FORMATS)}")
    if not out.endswith(make.ending):
        raise ValueError(
            f"{out}: {format_name} reads files whose names end in {make.ending}; choose such a name"
        )
    view = open_run(run_uri)
    run = view.run
    if files.exists(out):
        raise ValueError(f"{out}: is there already; choose another name or remove it")
    parts = view.parts("opened at version" if opened else "trains iteration")
    if not parts:
        what = "opened sessions have finished" if opened else "trajectories are committed"
        raise ValueError(f"{run.run_id}: no {what} yet")
    num_rows, left_out, unlike = 0, Counter[str](), 0
    kind: Format = make(parts)
    reader, unchecked = _open_reader(run)

    def rows() -> Iterator[list[Row]]:
        nonlocal num_rows, unlike
        for conversations in itertools.chain.from_iterable(map(_conversations, parts)):
            kept = []
            for conversation in conversations:
                if reader is not None:
                    as_seen = reader.is_as_seen(*kind.rendered(conversation), conversation.seen.tolist())
                    conversation.facts["as_seen"] = as_seen
                row = kind.convert(conversation)
                if isinstance(row, str):
                    left_out[row] += 1
                else:
                    unlike += conversation.facts["as_seen"] is False
                    kept.append(row)
            num_rows += len(kept)
            yield kept

    kind.write(out, rows())
    return Exported(num_rows, left_out, unlike, unchecked)


def _conversations(uri: str) -> Iterator[list[Conversation]]:
    iteration = iteration_of(uri)
    # `iteration` is in the URI, not in the file
    columns = [name for name in FACTS if name != "iteration"]
    columns += ["shared_prefix", "messages", "tools", "turns", "token_ids"]
    for batch in iter_trajectories(uri, MAX_ROWS, columns):
        ids = numpy_rows(pa.chunked_array([batch["token_ids"]]))
        rows = batch.drop_columns(["token_ids"]).to_pylist()
        yield [_conversation(row | {"iteration": iteration}, ids[i]) for i, row in enumerate(rows)]


def _conversation(row: dict[str, Any], ids: np.ndarray) -> Conversation:
    messages, turns = json.loads(row["messages"]), row["turns"]
    facts = {name: row[name] for name in FACTS} | {"as_seen": None}
    # a branch ends with an answer
    seen = ids[: turns[-1]["start"]] if turns else ids
    return Conversation(messages, _trained(messages, turns, row["shared_prefix"]), row["tools"], seen, facts)


def _open_reader(run: RunDirectory) -> tuple[Reader | None, str | None]:
    try:
        return Reader(run), None
    except ValueError as error:
        return None, str(error)


def _trained(
    messages: Sequence[Message], turns: Sequence[dict[str, Any]], shared_prefix: int
) -> list[bool] | None:
    """Whether each message is trained. A turn may cover several messages (tool results with one end, a prompt
    shared in part); a given answer, or one rewritten by the template, has no turn of its own."""
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


class _JsonLines:
    ending = ".jsonl"

    def __init__(self, parts: Sequence[str]) -> None:
        """`parts` is ignored: JSON needs no schema before writing."""

    def rendered(self, conversation: Conversation) -> Rendered:
        messages = [_without(message, "unparsed_calls") for message in conversation.messages]
        return messages, json.loads(conversation.tools or "[]")

    def write(self, uri: str, parts: Iterable[list[Row]]) -> None:
        with files.writer(uri) as file:
            for rows in parts:
                file.write(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))


class Trl(_JsonLines):
    """TRL's conversational prompt-completion type: messages before the first trained one, and the rest;
    huggingface.co/docs/trl/dataset_formats (docs/source/dataset_formats.md of huggingface/trl). Its trainers
    take `tools` as JSON text too, which `datasets` leaves as it is."""

    def convert(self, conversation: Conversation) -> Row | str:
        if conversation.trained is None:
            return _UNTOLD
        first = conversation.trained.index(True) if True in conversation.trained else 0
        if not first:
            return "no prompt before a sampled answer"
        messages, _ = self.rendered(conversation)
        facts = {"tools": conversation.tools, **conversation.facts}
        return {"prompt": messages[:first], "completion": messages[first:], **facts}


class Verl:
    """verl's MultiTurnSFTDataset (verl/utils/dataset/multiturn_sft_dataset.py of verl-project/verl): Parquet
    with a list of messages; `trainable` false keeps an assistant message out of the loss. Parquet has one
    type per field: arguments of tool calls are JSON strings, as in OpenAI's API, and a field that one tool
    has is null in all others."""

    ending = ".parquet"

    def __init__(self, parts: Sequence[str]) -> None:
        distinct = {text for uri in parts for text in _distinct_tools(uri)}
        self._tools, self._type = _in_parquet({text: json.loads(text) for text in sorted(distinct)})

    def rendered(self, conversation: Conversation) -> Rendered:
        tools = None if conversation.tools is None else self._tools.get(conversation.tools)
        return self._messages(conversation), tools or []

    def convert(self, conversation: Conversation) -> Row | str:
        if conversation.trained is None:
            return _UNTOLD
        if True not in conversation.trained:
            return "no sampled answer"
        tools = conversation.tools
        if tools is not None and tools not in self._tools:
            return "its tools have no type in Parquet"
        messages, facts = self._messages(conversation), conversation.facts
        columns = {"data_source": facts["environment"], "extra_info": facts}
        return {"messages": messages, "tools": self._tools[tools] if tools else None, **columns}

    def write(self, uri: str, parts: Iterable[list[Row]]) -> None:
        schema = _VERL_SCHEMA.append(pa.field("tools", self._type)) if self._tools else _VERL_SCHEMA
        with files.writer(uri) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for rows in parts:
                writer.write_table(pa.Table.from_pylist(rows, schema))

    def _messages(self, conversation: Conversation) -> list[Message]:
        trained = conversation.trained or [False] * len(conversation.messages)
        return [
            {
                **{name: message.get(name) for name in _MESSAGE_TEXTS},
                "tool_calls": [_call_with_text(call) for call in message.get("tool_calls", [])] or None,
                "trainable": is_trained if message["role"] == "assistant" else None,
            }
            for message, is_trained in zip(conversation.messages, trained, strict=True)
        ]


def _distinct_tools(uri: str) -> Iterator[str]:
    for batch in iter_trajectories(uri, MAX_ROWS, ["tools"]):
        yield from pc.unique(batch["tools"]).drop_null().to_pylist()


def _in_parquet(tools: dict[str, list[Tool]]) -> tuple[dict[str, list[Tool]], pa.DataType]:
    """Every list of tools as read back from a Parquet column that holds them all, and the column's type; no
    tools if there is no such type."""
    held = BytesIO()
    try:
        pq.write_table(pa.table({"tools": pa.array(tools.values())}), held)
        column = pq.read_table(held)["tools"]
    except pa.ArrowException:  # one field of two types, or a mapping that is always empty
        return {}, pa.null()
    return dict(zip(tools, column.to_pylist(), strict=True)), column.type


class ShareGpt(_JsonLines):
    """ShareGPT as LLaMA-Factory reads it (SharegptDatasetConverter and OpenAIDatasetConverter of
    src/llamafactory/data/converter.py in hiyouga/LlamaFactory): from human or observation, then from gpt or
    function_call, strictly alternating. Consecutive messages of one speaker are joined; text beside a call is
    left out, as there. `tools` is JSON text."""

    def convert(self, conversation: Conversation) -> Row | str:
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
        facts = {"tools": conversation.tools or "", **conversation.facts}
        return {"conversations": turns, "system": "\n".join(system), **facts}


_JOINTS = {"human": "\n", "observation": "\n</tool_response>\n<tool_response>\n"}
"""Separators between joined messages of one speaker; messages of the policy's side are never joined."""


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
_TYPES = {"iteration": pa.int32(), "reward": pa.float64(), "as_seen": pa.bool_()}
_VERL_SCHEMA = pa.schema(
    [
        ("messages", pa.list_(_MESSAGE)),
        ("data_source", pa.string()),
        (
            "extra_info",
            pa.struct([(name, _TYPES.get(name, pa.string())) for name in (*FACTS, "as_seen")]),
        ),
    ]
)


FORMATS: dict[str, type[Trl | Verl | ShareGpt]] = {"trl": Trl, "verl": Verl, "sharegpt": ShareGpt}
