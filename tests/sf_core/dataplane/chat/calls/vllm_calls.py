"""Reads the calls of texts with vLLM's own parsers. Runs in vLLM's environment.

Tools and a list of (format, text) come as JSON on stdin. Per text its calls go to stdout, each as a name and
its arguments as vLLM writes them.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"]


def make_tokenizer(*more: str) -> PreTrainedTokenizerFast:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Tokenizer(models.BPE({letter: n for n, letter in enumerate(sorted(alphabet))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in (*MARKS, *more)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def main() -> None:
    logging.disable(logging.CRITICAL)
    asked = json.load(sys.stdin)
    request = ChatCompletionRequest(
        model="policy", messages=[{"role": "user", "content": "hi"}], tools=asked["tools"]
    )
    tokenizers = {False: make_tokenizer(), True: make_tokenizer("[ARGS]")}
    answers: list[Any] = []
    for name, text in asked["texts"]:
        parser_class = ToolParserManager.get_tool_parser(name.removesuffix("_list"))
        parser = parser_class(tokenizers[name == "mistral"], request.tools)
        read = parser.extract_tool_calls(text, request)
        answers.append([[call.function.name, call.function.arguments] for call in read.tool_calls])
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
