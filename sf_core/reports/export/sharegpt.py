"""The format of ShareGPT."""

from __future__ import annotations

import json

from sf_core.dataplane.chat.messages import Message
from sf_core.reports.export.conversations import HAS_MARK, Format, Row, StoredChat, mark_images


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
