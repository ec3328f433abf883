"""An agent as most people write one: ask the model, run the tools it calls, repeat until it answers.

Uses nothing but the public OpenAI SDK, so it runs unchanged against any OpenAI-compatible endpoint.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sf_core.types import Endpoint

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionMessage

Content = str | list[dict[str, Any]]
"""The content of a message: one text, or a list of parts, each a text or an image."""


class LostToolError(Exception):
    """Raise this in a tool that cannot work any more, for example because its server has crashed.
    `run_tool_loop` then ends and raises the error in your agent. The model does not see the error. The
    session fails, unless your agent catches the error."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    ```python
    Tool(
        name="add",
        description="Add two numbers.",
        parameters={
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
        function=lambda a, b: str(a + b),
    )
    ```
    """

    name: str
    """The name that the model uses to call the function."""
    description: str
    """Text for the model: what the function does, and when to call it."""
    parameters: dict[str, Any]
    """The arguments of the function, as a JSON Schema."""
    function: Callable[..., Content | Awaitable[Content]]
    """A sync or async function. The function receives the arguments as keywords, and returns a text or a list
    of OpenAI's content parts. If the function raises an error, the model receives the text of the error as
    the result. If the function raises `LostToolError`, the loop ends."""

    @property
    def schema(self) -> Any:
        """The tool, as an entry for the field `tools` of an OpenAI request."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.parameters,
            },
        }


async def run_tool_loop(
    endpoint: Endpoint, prompt: Content, tools: Sequence[Tool] = (), max_turns: int = 4
) -> str:
    """Ask the model, and run the tools that the model calls, until an answer calls no tool.

    `prompt` is the user message: a text or a list of OpenAI's content parts. `max_turns` is the maximum
    number of requests to the model. Returns the text of the last answer. The text is empty if the answer to
    the last allowed request calls tools. An answer that reaches its maximum number of tokens is cut off: the
    text is then the part that was sampled, for the reward function to score. Raises LostToolError if a tool
    raises LostToolError.

    ```python
    async def agent(task: Task, endpoint: Endpoint) -> str:
        return await run_tool_loop(endpoint, task.prompt, [CALCULATOR], max_turns=8)
    ```
    """
    client = endpoint.client()
    by_name = {tool.name: tool for tool in tools}
    messages: list[Any] = [{"role": "user", "content": prompt}]
    for _ in range(max_turns):
        message = await _ask(client, endpoint.model, messages, tools)
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": await _run_tool(by_name, call)}
            for call in message.tool_calls
        ]
    return ""


async def _ask(
    client: AsyncOpenAI, model: str, messages: Sequence[Any], tools: Sequence[Tool]
) -> ChatCompletionMessage:
    """The model's next message.

    The SDK's `create` first walks the body by its types, which takes a third of a request's CPU and changes
    nothing in a body of plain values; so the body is posted as it is."""
    from openai.types.chat import ChatCompletion  # costs 0.9 s; only a process that asks a model pays it

    body = {"model": model, "messages": messages}
    if tools:
        body["tools"] = [tool.schema for tool in tools]
    completion = await client.post("/chat/completions", body=body, cast_to=ChatCompletion)
    return completion.choices[0].message


async def _run_tool(by_name: dict[str, Tool], call: Any) -> Content:
    try:
        tool = by_name[call.function.name]
        result = tool.function(**json.loads(call.function.arguments))
        return await result if inspect.isawaitable(result) else result
    except LostToolError:
        raise
    except Exception as error:  # the model wrote this call: it is told what was wrong and may try again
        return f"error: {error}"
