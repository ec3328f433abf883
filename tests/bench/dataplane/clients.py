"""What clients of each dialect ask and read, with the packages that agents use."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import anthropic
import httpx
import httpx2
import orjson
from google import genai
from openai import OpenAI

from sf_core.dataplane.gateway.dialects.anthropic import Anthropic
from sf_core.dataplane.gateway.dialects.chat import Chat
from sf_core.dataplane.gateway.dialects.completions import Completions
from sf_core.dataplane.gateway.dialects.google import Google
from sf_core.dataplane.gateway.dialects.responses import Responses
from sf_core.testing.dialects import HI, DialectTests, Fields, Heard
from tests.bench.dataplane import images
from tests.bench.dataplane.planes import CALC
from tests.bench.waits import patience

FUNCTION: dict[str, Any] = CALC["function"]
WITH_USAGE = {"include_usage": True}
BRIEF = {"role": "system", "content": "be brief"}


def canned(library: Any, body: bytes, kind: str) -> Any:
    """A client of this HTTP library whose every request is answered with this body."""
    response = library.Response(200, content=body, headers={"content-type": kind})
    return library.Client(transport=library.MockTransport(lambda _: response))


class Client(DialectTests):
    """A dialect as its client has it."""

    http: Any = httpx
    """The HTTP library of its package."""
    tools: Sequence[Any] = ()
    """The tool `calc`."""
    instructed: Mapping[str, Any] = MappingProxyType({})
    """Fields that tell the model to be brief."""
    forced: Sequence[tuple[Fields, str | None]] = ()
    """Fields that ask for a call, and the tool that they name."""

    def agent(self, url: str, http: Any = None) -> Any:
        """The client of a data plane or session at this URL, or one that `http` answers."""
        return OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=patience(), http_client=http
        )

    def ask(self, agent: Any, streamed: bool, body: Fields) -> list[Heard]:
        raise NotImplementedError

    def hear(self, body: bytes) -> list[Heard]:
        with self.agent("http://canned", canned(self.http, body, "application/json")) as agent:
            return self.ask(agent, False, self.request)

    def hear_stream(self, body: bytes) -> list[Heard]:
        with self.agent("http://canned", canned(self.http, body, "text/event-stream")) as agent:
            return self.ask(agent, True, self.request)


class ChatClient(Client):
    dialect = Chat()
    request: Mapping[str, Any] = {"model": "policy", "messages": [HI], "stream_options": WITH_USAGE}
    samples = "n"
    with_logprobs: Mapping[str, Any] = {"logprobs": True}
    ends: Mapping[str, str] = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}
    tools: Sequence[Any] = [CALC]
    instructed: Mapping[str, Any] = {"messages": [BRIEF, HI]}
    refused: Sequence[tuple[Fields, str]] = [
        ({"tool_choice": "maybe"}, "tool_choice must be"),
        ({"temperature": 3}, "temperature must be between 0 and 2"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "bard", "content": "hi"}]}, "messages[0].role must be one of"),
        ({"messages": [HI, {"role": "tool", "tool_call_id": "x"}]}, "'x' does not answer a tool call"),
        ({"messages": [{"role": "user", "content": 5}]}, "must be a string or a list of parts, got an"),
        ({"stop": [""]}, "stop must be"),
        ({"tools": [{"type": "function"}]}, "tools[0] must be a function with a name"),
        ({"tool_choice": "required"}, "the request has no tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "rm"}}, "tools": [CALC]},
            "names the unknown tool 'rm'",
        ),
    ]

    addressed: Sequence[Fields] = images.show_in_chat(url=images.ADDRESS)

    def show(self, data: str) -> Sequence[Fields]:
        return images.show_in_chat(data)

    def ask(self, agent: Any, streamed: bool, body: Fields) -> list[Heard]:
        if not streamed:
            answer = agent.chat.completions.create(**body)
            return [self._heard([choice.message], [choice], answer.usage) for choice in answer.choices]
        choices: defaultdict[int, list[Any]] = defaultdict(list)
        for chunk in agent.chat.completions.create(**body, stream=True):
            for choice in chunk.choices:
                choices[choice.index].append(choice)
        return [
            self._heard([choice.delta for choice in said], said, chunk.usage)
            for _, said in sorted(choices.items())
        ]

    @staticmethod
    def _heard(said: list[Any], choices: list[Any], usage: Any) -> Heard:
        calls = [call for message in said for call in message.tool_calls or ()]
        made = [(call.id, call.function.name, json.loads(call.function.arguments)) for call in calls]
        # whole answers number no calls
        assert [getattr(call, "index", i) for i, call in enumerate(calls)] == [*range(len(calls))]
        sampled = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        [end] = [choice.finish_reason for choice in choices if choice.finish_reason]
        return Heard(
            text="".join(message.content or "" for message in said),
            end=end,
            usage=(usage.prompt_tokens, usage.completion_tokens),
            calls=made,
            reasoning="".join(getattr(message, "reasoning_content", "") for message in said),
            logprobs=[entry.logprob for entry in sampled],
        )

    def next_request(self, body: bytes) -> dict[str, Any]:
        message = orjson.loads(body)["choices"][0]["message"]
        calls = message.get("tool_calls", [])
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in calls]
        return {**self.request, "messages": [HI, message, *results]}


class CompletionsClient(Client):
    dialect = Completions()
    request: Mapping[str, Any] = {"model": "policy", "prompt": "hi", "stream_options": WITH_USAGE}
    samples = "n"
    with_logprobs: Mapping[str, Any] = {"logprobs": 0}
    has_messages = False
    ends: Mapping[str, str] = {"stop": "stop", "length": "length"}
    refused: Sequence[tuple[Fields, str]] = [
        ({"prompt": []}, "prompt must be"),
        ({"prompt": ["a", ""]}, "prompt[1] must be a non-empty text"),
        ({"prompt": [1, "a"]}, "prompt[0] must be"),
        ({"top_k": -2}, "top_k must be at least -1"),
        ({"logprobs": 3}, "logprobs must be 0"),
        ({"best_of": 4}, "best_of must equal n"),
        ({"prompt": ["a"] * 100, "n": 2}, "at most 128"),
    ]

    def ask(self, agent: Any, streamed: bool, body: Fields) -> list[Heard]:
        if not streamed:
            answer = agent.completions.create(**body)
            return [self._heard([choice], answer.usage) for choice in answer.choices]
        choices: defaultdict[int, list[Any]] = defaultdict(list)
        for chunk in agent.completions.create(**body, stream=True):
            for choice in chunk.choices:
                choices[choice.index].append(choice)
        return [self._heard(said, chunk.usage) for _, said in sorted(choices.items())]

    @staticmethod
    def _heard(choices: list[Any], usage: Any) -> Heard:
        parts = [choice.logprobs for choice in choices if choice.logprobs]
        [end] = [choice.finish_reason for choice in choices if choice.finish_reason]
        return Heard(
            text="".join(choice.text for choice in choices),
            end=end,
            usage=(usage.prompt_tokens, usage.completion_tokens),
            logprobs=[logprob for part in parts for logprob in part.token_logprobs],
            more=[at for part in parts for at in zip(part.tokens, part.text_offset, strict=True)],
        )


class ResponsesClient(Client):
    dialect = Responses()
    request: Mapping[str, Any] = {"model": "policy", "input": "hi"}
    max_tokens = "max_output_tokens"
    with_logprobs: Mapping[str, Any] = {"include": ["message.output_text.logprobs"]}
    ends: Mapping[str, str] = {"stop": "completed", "length": "incomplete", "tool_calls": "completed"}
    instructed: Mapping[str, Any] = {"instructions": BRIEF["content"]}
    tools: Sequence[Any] = [{"type": "function", "strict": False, **FUNCTION}]
    forced: Sequence[tuple[Fields, str | None]] = [({"tool_choice": "required"}, None)]
    refused: Sequence[tuple[Fields, str]] = [
        ({"input": []}, "at least one message"),
        ({"input": 5}, "input must be a string or a list of items"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role must be"),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]},
            "does not answer a tool",
        ),
        ({"input": [{"type": "image_generation_call"}]}, "are not supported"),
        ({"tools": [{"type": "file_search"}]}, "only functions are supported, not file_search"),
    ]

    addressed: Sequence[Fields] = [
        *images.show_in_responses(held={"image_url": images.ADDRESS}),
        *images.show_in_responses(held={"file_id": "file-1"}),
    ]

    def show(self, data: str) -> Sequence[Fields]:
        return images.show_in_responses(data)

    def ask(self, agent: Any, streamed: bool, body: Fields) -> list[Heard]:
        if not streamed:
            return [self._heard(agent.responses.create(**body))]
        *_, last = agent.responses.create(**body, stream=True)
        assert last.type == f"response.{last.response.status}"
        return [self._heard(last.response)]

    @staticmethod
    def _heard(answer: Any) -> Heard:
        texts = {"message": "", "reasoning": ""}
        calls = []
        logprobs = []
        for item in answer.output:
            if item.type == "function_call":
                calls.append((item.call_id, item.name, json.loads(item.arguments)))
            else:
                texts[item.type] += item.content[0].text
                logprobs += [entry.logprob for entry in getattr(item.content[0], "logprobs", None) or ()]
        return Heard(
            text=texts["message"],
            end=answer.status,
            usage=(answer.usage.input_tokens, answer.usage.output_tokens),
            calls=calls,
            reasoning=texts["reasoning"],
            logprobs=logprobs,
            more=answer.model_dump(exclude={"created_at"}),
        )

    def next_request(self, body: bytes) -> dict[str, Any]:
        output = orjson.loads(body)["output"]
        calls = [item["call_id"] for item in output if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call, "output": "r"} for call in calls]
        return {**self.request, "input": [HI, *output, *results]}


class AnthropicClient(Client):
    dialect = Anthropic()
    http = httpx2
    request: Mapping[str, Any] = {"model": "policy", "messages": [HI], "max_tokens": 100}
    ends: Mapping[str, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    instructed: Mapping[str, Any] = {"system": BRIEF["content"]}
    tools: Sequence[Any] = [
        {"name": FUNCTION["name"], "description": "Evaluates.", "input_schema": FUNCTION["parameters"]}
    ]
    forced: Sequence[tuple[Fields, str | None]] = [
        ({"tool_choice": {"type": "tool", "name": "calc"}}, "calc")
    ]
    refused: Sequence[tuple[Fields, str]] = [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"temperature": 2}, "temperature must be between 0 and 1"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "must be user, assistant or system"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "does not answer a tool call",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "image blocks are not supported",
        ),
        ({"messages": [HI, {"role": "assistant", "content": "so"}]}, "cannot continue an answer"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "are not supported"),
        ({"tool_choice": {"type": "any"}}, "the request has no tools"),
    ]

    addressed: Sequence[Fields] = [
        *images.show_in_messages(source={"type": "url", "url": images.ADDRESS}),
        *images.show_in_messages(source={"type": "file", "file_id": "file_1"}),
    ]

    def show(self, data: str) -> Sequence[Fields]:
        return images.show_in_messages(data)

    def agent(self, url: str, http: Any = None) -> Any:
        return anthropic.Anthropic(
            base_url=url, api_key="none", max_retries=0, timeout=patience(), http_client=http
        )

    def ask(self, agent: Any, streamed: bool, body: Fields) -> list[Heard]:
        if not streamed:
            return [self._heard(agent.messages.create(**body))]
        with agent.messages.stream(**body) as stream:
            return [self._heard(stream.get_final_message())]

    @staticmethod
    def _heard(answer: Any) -> Heard:
        thoughts = [block.thinking for block in answer.content if block.type == "thinking"]
        # clients drop reasoning without one
        assert all(block.signature for block in answer.content if block.type == "thinking")
        texts = [block.text for block in answer.content if block.type == "text"]
        calls = [(block.id, block.name, block.input) for block in answer.content if block.type == "tool_use"]
        assert len(thoughts) <= 1 and len(texts) <= 1
        assert (answer.stop_sequence is None) == (answer.stop_reason != "stop_sequence")
        return Heard(
            text="".join(texts),
            end=answer.stop_reason,
            usage=(answer.usage.input_tokens, answer.usage.output_tokens),
            calls=calls,
            reasoning="".join(thoughts),
            more=(answer.stop_sequence, [block.type for block in answer.content]),
        )

    def next_request(self, body: bytes) -> dict[str, Any]:
        content = orjson.loads(body)["content"]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "r"}
            for block in content
            if block["type"] == "tool_use"
        ]
        after = results or [{"type": "text", "text": "r"}]
        answer = {"role": "assistant", "content": content}
        return {**self.request, "messages": [HI, answer, {"role": "user", "content": after}]}


class GoogleClient(Client):
    dialect = Google()
    http = httpx2
    request: Mapping[str, Any] = {
        "model": "policy",
        "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
    }
    max_tokens = "max_output_tokens"
    samples = "candidate_count"
    with_logprobs: Mapping[str, Any] = {"response_logprobs": True}
    ends: Mapping[str, str] = {"stop": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP"}
    instructed: Mapping[str, Any] = {"system_instruction": {"parts": [{"text": BRIEF["content"]}]}}
    tools: Sequence[Any] = [
        {
            "function_declarations": [
                {
                    "name": FUNCTION["name"],
                    "description": "Evaluates.",
                    "parameters_json_schema": FUNCTION["parameters"],
                }
            ]
        }
    ]
    forced: Sequence[tuple[Fields, str | None]] = [
        ({"tool_config": {"function_calling_config": {"mode": "ANY", **allowed}}}, name)
        for allowed, name in (({}, None), ({"allowed_function_names": ["calc"]}, "calc"))
    ]
    kind_of_error = "status"
    refused: Sequence[tuple[Fields, str]] = [
        ({"contents": []}, "at least one message"),
        ({"contents": ["hi"]}, "contents[0] must be an object with parts, got a string"),
        (
            {"contents": [{"role": "bard", "parts": [{"text": "hi"}]}]},
            "contents[0].role must be one of user,",
        ),
        ({"contents": [{"role": "user", "parts": []}]}, "contents[0].parts must contain at least one part"),
        ({"contents": [{"parts": [{"inline_data": {}}]}]}, "inline_data parts are not supported for user"),
        (
            {"contents": [{"parts": [{"function_call": {}}]}]},
            "function_call parts are not supported for user",
        ),
        ({"contents": [{"parts": [{}]}]}, "contents[0].parts[0]: empty parts are not supported"),
        ({"contents": [{"parts": [{"text": 5}]}]}, "contents[0].parts[0].text must not be an integer"),
        (
            {"contents": [{"parts": [{"function_response": {"name": "calc", "response": {}}}]}]},
            "contents[0].parts[0]: the result of 'calc' does not answer an open call",
        ),
        (
            {"contents": [{"parts": [{"text": "hi"}]}, {"role": "model", "parts": [{"text": "so"}]}]},
            "cannot continue an answer",
        ),
        ({"top_k": 1.5}, "top_k must be a whole number, got 1.5"),
        ({"logprobs": 3}, "logprobs must be 0"),
        ({"tools": [{"computer_use": {}}]}, "tools[0]: only functions are supported, not computer_use"),
        (
            {"tools": [{"function_declarations": [{}]}]},
            "tools[0].function_declarations[0] must be a function",
        ),
        ({"tool_config": {"function_calling_config": {"mode": "ANY"}}}, "the request has no tools"),
        (
            {"tool_config": {"function_calling_config": {"mode": "MAY"}}},
            "mode must be one of AUTO, VALIDATED",
        ),
        (
            {"tool_config": {"function_calling_config": {"allowed_function_names": ["rm"]}}},
            "function_calling_config allows functions that are not in tools: 'rm'",
        ),
    ]

    addressed: Sequence[Fields] = images.show_in_google(
        part={"file_data": {"mime_type": "image/png", "file_uri": images.ADDRESS}}
    )

    def show(self, data: str) -> Sequence[Fields]:
        return images.show_in_google(data)

    def agent(self, url: str, http: Any = None, key: str = "none") -> Any:
        options = {"base_url": url, "timeout": 20_000}
        if http is not None:
            # of both kinds, or it reads the machine's certificates
            options |= {"httpx_client": http, "httpx_async_client": httpx2.AsyncClient(verify=False)}
        return genai.Client(api_key=key, vertexai=False, http_options=options)

    def ask(self, agent: Any, streamed: bool, body: Fields) -> list[Heard]:
        config = {name: value for name, value in body.items() if name not in ("model", "contents")}
        asked = {"model": body["model"], "contents": body["contents"], "config": config}
        if not streamed:
            chunks = [agent.models.generate_content(**asked)]
        else:
            chunks = list(agent.models.generate_content_stream(**asked))
        assert len({(chunk.response_id, chunk.model_version) for chunk in chunks}) == 1
        said: defaultdict[int, list[Any]] = defaultdict(list)
        for chunk in chunks:
            for candidate in chunk.candidates:
                assert candidate.content.role == "model"
                said[candidate.index].append(candidate)
        return [self._heard(said, chunks[-1].usage_metadata) for _, said in sorted(said.items())]

    @staticmethod
    def _heard(candidates: list[Any], usage: Any) -> Heard:
        parts = [part for candidate in candidates for part in candidate.content.parts]
        made = [part.function_call for part in parts if part.function_call]
        results = [candidate.logprobs_result for candidate in candidates if candidate.logprobs_result]
        [end] = [candidate.finish_reason for candidate in candidates if candidate.finish_reason]
        assert usage.total_token_count == usage.prompt_token_count + usage.candidates_token_count
        return Heard(
            text="".join(part.text or "" for part in parts if not part.thought),
            end=end,
            usage=(usage.prompt_token_count, usage.candidates_token_count),
            calls=[(call.id, call.name, call.args) for call in made],
            reasoning="".join(part.text for part in parts if part.thought),
            logprobs=[entry.log_probability for result in results for entry in result.chosen_candidates],
        )

    def models(self, listed: dict[str, Any]) -> list[str]:
        return [entry["name"].removeprefix("models/") for entry in listed["models"]]

    def next_request(self, body: bytes) -> dict[str, Any]:
        content = orjson.loads(body)["candidates"][0]["content"]
        calls = [part["functionCall"] for part in content["parts"] if "functionCall" in part]
        results = [
            {"functionResponse": {"name": call["name"], "response": {"output": "r"}}} for call in calls
        ]
        asked = {"role": "user", "parts": results or [{"text": "r"}]}
        sent = {"contents": [*self.request["contents"], content, asked]}
        return self.dialect.read(sent, "/v1beta/models/policy:generateContent")


CLIENTS: list[Client] = [
    ChatClient(),
    CompletionsClient(),
    ResponsesClient(),
    AnthropicClient(),
    GoogleClient(),
]
