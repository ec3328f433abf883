"""The format of verl."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sf_core.dataplane.chat.messages import Message
from sf_core.dataplane.chat.tool_formats import Tool
from sf_core.reports.export.conversations import (
    FACTS,
    HAS_MARK,
    MAX_ROWS,
    SAMPLED_UNKNOWN,
    Format,
    Rendered,
    Row,
    StoredChat,
    mark_images,
)
from storage import files
from storage.json_files import load_json
from storage.tables.trajectories import iter_trajectories


class Verl(Format):
    """verl's MultiTurnSFTDataset (verl/utils/dataset/multiturn_sft_dataset.py of verl-project/verl): Parquet
    with a list of messages; `trainable` false keeps an assistant message out of the loss. Parquet has one
    type per field: arguments of tool calls are JSON strings, as in OpenAI's API, and a field that one tool
    has is null in all others. Files of images, for which `<image>` in texts stands, are in `images`."""

    ending = ".parquet"

    def __init__(self, parts: Sequence[str]) -> None:
        distinct = {text for uri in parts for text in _distinct_tools(uri)}
        self._tools, self._type = _in_parquet({text: load_json(text) for text in sorted(distinct)})

    def render(self, conversation: StoredChat) -> Rendered:
        tools = None if conversation.tools is None else self._tools.get(conversation.tools)
        return self._messages(conversation, conversation.messages), tools or []

    def convert(self, conversation: StoredChat) -> Row | str:
        if conversation.trained is None:
            return SAMPLED_UNKNOWN
        if True not in conversation.trained:
            return "no sampled answer"
        tools = conversation.tools
        if tools is not None and tools not in self._tools:
            return "the tools have no Parquet type"
        marked = mark_images(conversation)
        facts = conversation.facts
        if marked is None:
            return HAS_MARK
        messages = self._messages(conversation, marked)
        columns = {"data_source": facts["environment"], "extra_info": facts}
        if conversation.images is not None:
            columns["images"] = [{"image": file} for file in conversation.images]
        return {"messages": messages, "tools": self._tools[tools] if tools else None, **columns}

    def write(self, uri: str, parts: Iterable[list[Row]]) -> None:
        lists = filter(None, parts)
        first = next(lists, [])
        schema = _VERL_SCHEMA.append(pa.field("tools", self._type)) if self._tools else _VERL_SCHEMA
        schema = schema.append(_IMAGES) if first and "images" in first[0] else schema
        with files.writer(uri) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for rows in itertools.chain([first], lists):
                writer.write_table(pa.Table.from_pylist(rows, schema))

    def _messages(self, conversation: StoredChat, messages: Sequence[Message]) -> list[Message]:
        trained = conversation.trained or [False] * len(messages)
        return [
            {
                **{name: message.get(name) for name in _MESSAGE_TEXTS},
                "tool_calls": [_call_with_text(call) for call in message.get("tool_calls", [])] or None,
                "trainable": is_trained if message["role"] == "assistant" else None,
            }
            for message, is_trained in zip(messages, trained, strict=True)
        ]


def _distinct_tools(uri: str) -> Iterator[str]:
    for batch in iter_trajectories(uri, MAX_ROWS, ["tools"]):
        yield from pc.unique(batch["tools"]).drop_null().to_pylist()


def _in_parquet(tools: dict[str, list[Tool]]) -> tuple[dict[str, list[Tool]], pa.DataType]:
    """Every list of tools as read back from a Parquet column that holds them all, and the column's type; no
    tools if there is no such type."""
    file = BytesIO()
    try:
        pq.write_table(pa.table({"tools": pa.array(tools.values())}), file)
        column = pq.read_table(file)["tools"]
    # one field of two types, or a mapping that is always empty; large integers; halves of characters
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        return {}, pa.null()
    return dict(zip(tools, column.to_pylist(), strict=True)), column.type


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
_IMAGES = pa.field("images", pa.list_(pa.struct([("image", pa.string())])))
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
