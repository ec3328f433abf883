"""Harbor's trajectory format."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

import msgspec

from sf_core.dataplane.chat.messages import Message, text_of
from sf_core.reports.export.conversations import SAMPLED_UNKNOWN, Format, Row, StoredChat, Turn
from storage import files
from storage.json_files import load_json

SOURCES = {"assistant": "agent", "user": "user"}
"""Sources of steps by role; all other messages are the system's."""


class Atif(Format):
    """ATIF 1.7 (harbor/models/trajectories of harbor 0.25): a folder with a document per session. It is that
    of the session's first branch, and embeds those of the others, which share its `session_id`.

    A step of the agent that is trained here has the ids that the engine got and returned, and their
    log-probs. Other steps of the agent are `is_copied_context`, which Harbor keeps out of training: answers
    that an earlier branch has, that were given, or that the template rewrote."""

    ending = ""

    def convert(self, conversation: StoredChat) -> Row | str:
        if conversation.sampled is None:
            return SAMPLED_UNKNOWN
        facts = conversation.facts | {"parent_branch_id": conversation.parent_branch_id}
        agent = {
            "name": "seamlessflow",
            "version": version("seamlessflow"),
            "model_name": conversation.policy,
        }
        if conversation.tools is not None:
            agent["tool_definitions"] = load_json(conversation.tools)
        return {
            "schema_version": "ATIF-v1.7",
            "session_id": facts.pop("session_id"),
            "trajectory_id": facts.pop("branch_id"),
            "agent": agent,
            "steps": _steps(conversation, conversation.sampled),
            "extra": facts,
        }

    def write(self, uri: str, parts: Iterable[list[Row]]) -> None:
        branches = itertools.chain.from_iterable(parts)
        try:
            for session_id, (first, *others) in itertools.groupby(branches, lambda row: row["session_id"]):
                document = first | ({"subagent_trajectories": others} if others else {})
                files.write_atomic(files.join(uri, f"{session_id}.json"), msgspec.json.encode(document))
        except BaseException:
            files.remove_folder(uri)
            raise


def _steps(conversation: StoredChat, sampled: Sequence[Turn | None]) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    images = iter(conversation.images or ())

    def read(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        if isinstance(content, str) or all(part["type"] == "text" for part in content):
            return text_of({"content": content})
        return [
            {"type": "text", "text": part["text"]}
            if part["type"] == "text"
            else {"type": "image", "source": {"media_type": "image/png", "path": next(images)}}
            for part in content
        ]

    for message, turn in zip(conversation.messages, sampled, strict=True):
        if message["role"] == "tool":
            # it answers a call of the last answer, which a system message may have followed
            last = next(step for step in reversed(steps) if step["source"] == "agent")
            result = {"source_call_id": message["tool_call_id"], "content": read(message["content"])}
            last.setdefault("observation", {"results": []})["results"].append(result)
            continue
        source = SOURCES.get(message["role"], "system")
        step = {"step_id": len(steps) + 1, "source": source, "message": read(message["content"])}
        if source == "agent":
            step |= _convert_answer(message)
            step |= _metrics(conversation, turn) if turn else {"is_copied_context": True}
        steps.append(step)
    return steps


def _convert_answer(message: Message) -> dict[str, Any]:
    """The fields of an answer beside its text."""
    fields: dict[str, Any] = {}
    if thought := message.get("reasoning_content"):
        fields["reasoning_content"] = thought
    if calls := message.get("tool_calls"):
        fields["tool_calls"] = list(map(_convert_call, calls))
    if unparsed := message.get("unparsed_calls"):
        fields["extra"] = {"unparsed_calls": unparsed}
    return fields


def _convert_call(call: dict[str, Any]) -> dict[str, Any]:
    name = call["function"]["name"]
    arguments = call["function"]["arguments"]
    return {"tool_call_id": call["id"], "function_name": name, "arguments": arguments}


def _metrics(conversation: StoredChat, turn: Turn) -> dict[str, Any]:
    start = turn["start"]
    end = turn["end"]
    facts = {name: value for name, value in turn.items() if name not in ("role", "start", "end")}
    metrics = {
        "prompt_tokens": start,
        "completion_tokens": end - start,
        "prompt_token_ids": conversation.token_ids[:start].tolist(),
        "completion_token_ids": conversation.token_ids[start:end].tolist(),
        "logprobs": conversation.logprobs[start:end].tolist(),
        "extra": {"policy_versions": conversation.policy_versions[start:end].tolist(), **facts},
    }
    return {"llm_call_count": 1, "metrics": metrics}
