"""Stored branches as conversations, which formats convert to rows; the base of all formats, and the formats
of ShareGPT and TRL.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from sf_core.dataplane.chat.messages import Message, list_image_parts, text_of
from sf_core.dataplane.chat.tool_formats import Tool
from storage import files
from storage.json_files import load_json
from storage.media import media_file
from storage.tables.parquet import numpy_rows
from storage.tables.schema import IMAGES, NOT_SAMPLED
from storage.tables.trajectories import iter_trajectories, iteration_of

FACTS = ("iteration", "session_id", "branch_id", "group_id", "task_id", "environment", "reward", "status")
"""Columns of every format beside the conversation."""

MAX_ROWS = 256
"""Number of rows in memory at a time."""

SAMPLED_UNKNOWN = "it is unknown which answers were sampled"

Turn = dict[str, Any]
"""An element of the column `turns`."""

_PER_TOKEN = {"token_ids": None, "logprobs": np.nan, "policy_versions": NOT_SAMPLED}
"""Columns with one value per token, and the value that stands for null."""


@dataclass(frozen=True, slots=True)
class StoredChat:
    messages: list[Message]
    """Contents are texts; lists of parts if the policy takes images."""
    sampled: list[Turn | None] | None
    """For each message the turn that sampled it, unless an earlier branch has it; None if the turns are
    unknown."""
    tools: str | None
    """Tools as JSON text; None if there are none."""
    turns: list[Turn]
    token_ids: np.ndarray
    logprobs: np.ndarray
    policy_versions: np.ndarray
    images: list[str] | None
    """Files of the images in the messages, in order; None if the policy takes no images."""
    policy: str
    parent_branch_id: str | None
    facts: dict[str, Any]

    @property
    def trained(self) -> list[bool] | None:
        """Whether each message is trained; None if that is unknown."""
        return None if self.sampled is None else [turn is not None for turn in self.sampled]

    @property
    def prompt_ids(self) -> np.ndarray:
        """Token ids before the last answer, with which a branch ends."""
        return self.token_ids[: self.turns[-1]["start"]] if self.turns else self.token_ids


Row = dict[str, Any]
Rendered = tuple[list[Message], list[Tool]]
"""Messages and tools as a reader of the format passes them to a chat template."""


class Format:
    """Base of all formats. By default a format is a file with one JSON object per line."""

    ending = ".jsonl"

    def __init__(self, parts: Sequence[str]) -> None:
        """`parts` is ignored: JSON needs no schema before writing."""

    def render(self, conversation: StoredChat) -> Rendered:
        """Messages and tools with all that templates read; images are parts, as readers give them."""
        messages = [
            {name: value for name, value in message.items() if name != "unparsed_calls"}
            for message in conversation.messages
        ]
        return messages, load_json(conversation.tools or "[]")

    def convert(self, conversation: StoredChat) -> Row | str:
        """A row, or the reason why the format cannot hold it."""
        raise NotImplementedError

    def write(self, uri: str, parts: Iterable[list[Row]]) -> None:
        """Write lists of rows one after the other."""
        with files.writer(uri) as file:
            for rows in parts:
                file.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def read_conversations(uri: str, media: str) -> Iterator[list[StoredChat]]:
    """`media`: the folder of the run's images."""
    iteration = iteration_of(uri)
    # `iteration` is in the URI, not in the file
    columns = [name for name in FACTS if name != "iteration"]
    columns += [
        "policy",
        "parent_branch_id",
        "shared_prefix",
        "messages",
        "tools",
        "turns",
        *_PER_TOKEN,
        IMAGES.name,
    ]
    for batch in iter_trajectories(uri, MAX_ROWS, columns):
        tokens = [numpy_rows(pa.chunked_array([batch[name]]), null) for name, null in _PER_TOKEN.items()]
        rows = batch.drop_columns([*_PER_TOKEN]).to_pylist()
        yield [
            _conversation(row | {"iteration": iteration}, media, *of_row)
            for row, *of_row in zip(rows, *tokens, strict=True)
        ]


def _conversation(
    row: dict[str, Any], media: str, token_ids: np.ndarray, logprobs: np.ndarray, policy_versions: np.ndarray
) -> StoredChat:
    messages = load_json(row["messages"])
    turns = row["turns"]
    images = None
    if IMAGES.name in row:
        images = [media_file(media, part["sha256"]) for part in list_image_parts(messages)]
    # texts and parts would make columns of two types
    read = text_of if images is None else _parts_of
    messages = [message | {"content": read(message)} for message in messages]
    return StoredChat(
        messages,
        _find_sampled(messages, turns, row["shared_prefix"]),
        row["tools"],
        turns,
        token_ids,
        logprobs,
        policy_versions,
        images,
        row["policy"],
        row["parent_branch_id"],
        {name: row[name] for name in FACTS} | {"as_seen": None},
    )


def _parts_of(message: Message) -> list[dict[str, Any]]:
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    filled = [part for part in parts if part.get("text") != ""]
    return [{"type": part["type"], "text": part.get("text")} for part in filled]


_MARK = "<image>"

HAS_MARK = f"a text contains {_MARK}"
"""Why a conversation with images is left out: a reader would take the text for an image."""


def mark_images(conversation: StoredChat) -> list[Message] | None:
    """The messages, each with one text, in which `<image>` stands for each image: LLaMA-Factory and verl
    replace it by the next image of the row. None if a text contains `<image>` itself."""
    if conversation.images is None:
        return conversation.messages
    with_marks = [
        {**message, "content": "".join(part["text"] or _MARK for part in message["content"])}
        for message in conversation.messages
    ]
    has_mark = sum(message["content"].count(_MARK) for message in with_marks) > len(conversation.images)
    return None if has_mark else with_marks


def _find_sampled(
    messages: Sequence[Message], turns: Sequence[Turn], shared_prefix: int
) -> list[Turn | None] | None:
    """See `StoredChat.sampled`. A turn may cover several messages (tool results with one end, a prompt
    shared in part); a given answer, or one rewritten by the template, has no turn of its own."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    sampled: list[Turn | None] = []
    for turn in turns:
        if turn["role"] == "assistant":
            is_sampled = turn["engine"] is not None and turn["end"] > shared_prefix
            sampled.append(turn if is_sampled else None)
    if len(answers) != len(sampled):
        num_sampled = sum(turn is not None for turn in sampled)
        if num_sampled != 1 or sampled[-1] is None:
            return None
        # a branch ends with what was sampled last
        answers = answers[-1:]
        sampled = sampled[-1:]
    turn_of = dict(zip(answers, sampled, strict=True))
    return [turn_of.get(i) for i in range(len(messages))]


class ShareGpt(Format):
    """ShareGPT as LLaMA-Factory reads it (SharegptDatasetConverter and OpenAIDatasetConverter of
    src/llamafactory/data/converter.py in hiyouga/LlamaFactory): from human or observation, then from gpt or
    function_call, strictly alternating. Consecutive messages of one speaker are joined; text beside a call is
    left out, as there. `tools` is JSON text; `images` are the files that `<image>` in texts stands for."""

    def convert(self, conversation: StoredChat) -> Row | str:
        messages = mark_images(conversation)
        if messages is None:
            return HAS_MARK
        system = [message["content"] for message in messages if message["role"] == "system"]
        turns: list[dict[str, str]] = []
        for message in messages:
            if message["role"] == "system":
                continue
            speaker, value = _convert_message(message)
            if turns and turns[-1]["from"] == speaker and speaker in _JOINTS:
                turns[-1]["value"] += _JOINTS[speaker] + value
            else:
                turns.append({"from": speaker, "value": value})
        sides = [turn["from"] in _JOINTS for turn in turns]
        if not turns or len(turns) % 2 or sides != [True, False] * (len(turns) // 2):
            return "speakers do not take turns"
        facts = {"tools": conversation.tools or "", **conversation.facts}
        images = {} if conversation.images is None else {"images": conversation.images}
        return {"conversations": turns, "system": "\n".join(system), **images, **facts}


_JOINTS = {"human": "\n", "observation": "\n</tool_response>\n<tool_response>\n"}
"""Separators between joined messages of one speaker; messages of the policy's side are never joined."""


def _convert_message(message: Message) -> tuple[str, str]:
    if message["role"] == "tool":
        return "observation", message["content"]
    if message["role"] != "assistant":
        return "human", message["content"]
    thought = message.get("reasoning_content")
    prefix = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    if calls := message.get("tool_calls"):
        return "function_call", prefix + json.dumps([call["function"] for call in calls], ensure_ascii=False)
    return "gpt", prefix + message["content"]


class Trl(Format):
    """TRL's conversational prompt-completion type: messages before the first trained one, and the rest;
    huggingface.co/docs/trl/dataset_formats (docs/source/dataset_formats.md of huggingface/trl). Its trainers
    take `tools` as JSON text too, which `datasets` leaves as it is. Files of images are in `images`."""

    def convert(self, conversation: StoredChat) -> Row | str:
        if conversation.trained is None:
            return SAMPLED_UNKNOWN
        first = conversation.trained.index(True) if True in conversation.trained else 0
        if not first:
            return "no prompt before a sampled answer"
        messages, _ = self.render(conversation)
        images = {} if conversation.images is None else {"images": conversation.images}
        facts = {"tools": conversation.tools, **images, **conversation.facts}
        return {"prompt": messages[:first], "completion": messages[first:], **facts}
