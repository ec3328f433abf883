"""The chat templates of a model folder, rendered as in transformers, with the variables that vLLM passes.

Owns the form in which a template gets a message: text as one string or as parts, and `developer` messages,
which most templates do not know. Uses jinja2 directly, because transformers imports torch: 3 s and 250 MB.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sf_core.dataplane.chat.messages import Message, image_parts_of, text_of
from sf_core.dataplane.chat.tool_formats import Tool
from storage.files import read_bytes

DEFAULT = "default"
"""Name of the template that is used by default."""

WITH_TOOLS = "tool_use"
"""Name of the template that is used for requests with tools, if there is one."""


class ChatTemplate:
    """One template. Raises jinja2.TemplateSyntaxError."""

    def __init__(self, source: str) -> None:
        self.source = source
        environment = _make_environment()
        tree = environment.parse(source)
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        """Variables that the template reads."""
        self._takes_parts = _loops_over_content(tree)
        self._knows_developer = "'developer'" in source or '"developer"' in source
        self._template = environment.from_string(tree)
        # jinja copies the globals for each rendering, and a ChainMap copies slowly
        self._template.globals = dict(self._template.globals)

    def render(
        self,
        messages: list[Message],
        tools: list[Tool],
        variables: Mapping[str, Any],
        num_first: int | None,
    ) -> str:
        """The text of these messages. Raises TemplateError if the template refuses or fails on them.

        `num_first`: number of messages before the first recorded answer; None if no answer is recorded."""
        if self._knows_developer or all(message["role"] != "developer" for message in messages):
            return self._render(messages, tools, variables)
        if num_first is not None:
            # if the template takes no system message after the first, recorded ids cannot be kept
            with suppress(jinja2.TemplateError):
                return self._render(_without_developer(messages, num_first), tools, variables)
        return self._render(_without_developer(messages, None), tools, variables)

    def _render(self, messages: list[Message], tools: list[Tool], variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(
                variables,
                messages=[self._adapt_message(message) for message in messages],
                tools=tools or None,
                documents=None,
            )
        except jinja2.TemplateError:
            raise
        except Exception as error:  # a template is a program and may raise anything
            raise jinja2.TemplateError(f"{type(error).__name__}: {error}") from error

    def _adapt_message(self, message: Message) -> Message:
        """The message as the template gets it: its text in parts if the template loops over them."""
        content = message["content"]
        if "reasoning_content" in message:
            message = {**message, "reasoning": message["reasoning_content"]}
        if any(image_parts_of(content)):
            # Renderer.check_shown counts the placeholders in the rendering
            return message
        if not self._takes_parts or message["role"] == "tool":
            return message if isinstance(content, str) else {**message, "content": text_of(message)}
        if isinstance(content, str):
            # an answer without content has no part
            is_empty_answer = not content and message["role"] == "assistant"
            parts = [] if is_empty_answer else [{"type": "text", "text": content}]
            return {**message, "content": parts}
        return message


class ChatTemplates:
    """The chat templates of one folder. Raises jinja2.TemplateSyntaxError."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = sources
        self._default = ChatTemplate(sources[DEFAULT])
        self._with_tools = ChatTemplate(sources[WITH_TOOLS]) if WITH_TOOLS in sources else self._default
        self.variables = self._default.variables | self._with_tools.variables
        self.refuses_late_system = any(
            _refuses_late_system(template.source) for template in (self._default, self._with_tools)
        )
        """Whether Anthropic's later system messages are merged into the first. The rule is vLLM's."""

    def of(self, tools: list[Tool]) -> ChatTemplate:
        return self._with_tools if tools else self._default

    def contain(self, text: str) -> bool:
        return text in self._default.source or text in self._with_tools.source


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Sources by name: of chat_template.jinja and additional_chat_templates/, else of tokenizer_config.json,
    which is `config`. Empty without templates."""
    sources = {
        path.stem: read_bytes(str(path)).decode()
        for path in (folder / "additional_chat_templates").glob("*.jinja")
    }
    if (folder / "chat_template.jinja").exists():
        sources[DEFAULT] = read_bytes(str(folder / "chat_template.jinja")).decode()
    configured = config.get("chat_template")
    if sources or not configured:
        return sources
    if isinstance(configured, str):
        return {DEFAULT: configured}
    return {str(entry["name"]): str(entry["template"]) for entry in configured}


def merge_system(messages: list[Message], between: str) -> list[Message]:
    """The messages with the texts of all system messages in one, the first."""
    texts = [text_of(message) for message in messages if message["role"] == "system"]
    merged = {"role": "system", "content": between.join(filter(None, texts))}
    return [merged, *(message for message in messages if message["role"] != "system")]


def _without_developer(messages: list[Message], num_first: int | None) -> list[Message]:
    """The messages with `developer` as `system`; of the first `num_first`, those of both roles are merged."""
    end = len(messages) if num_first is None else num_first
    first = messages[:end]
    if any(message["role"] == "developer" for message in first):
        first = _as_system(first)
        if any(message["role"] == "system" for message in first[1:]):
            first = merge_system(first, "\n\n")
    return first + _as_system(messages[end:])


def _as_system(messages: list[Message]) -> list[Message]:
    return [
        {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
    ]


@lru_cache(maxsize=16)
def _refuses_late_system(source: str) -> bool:
    # vLLM renders in an environment without transformers' additions. If the template fails for lack of one,
    # that counts as a refusal.
    bare = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    probe = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    try:
        bare.from_string(source).render(messages=probe, add_generation_prompt=False)
    except Exception:  # a template is a program and may raise anything
        return True
    return False


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether the template loops over the parts of a message's content, itself or in a macro that gets the
    content. By this rule vLLM decides whether a template gets parts."""
    macros = list(tree.find_all(nodes.Macro))
    macro_of_loop = {id(loop): macro for macro in macros for loop in macro.find_all(nodes.For)}
    for loop in tree.find_all(nodes.For):
        iterated = _unwrap(loop.iter)
        macro = macro_of_loop.get(id(loop))
        if _reads_content(iterated):
            return True
        if isinstance(iterated, nodes.Name):
            if macro is None and iterated.name == "content":
                return True
            if macro is not None and iterated.name in _content_arguments(tree, macro):
                return True
    return False


def _content_arguments(tree: nodes.Template, macro: nodes.Macro) -> set[str]:
    """Names of the macro's arguments that get a message's content in some call."""
    names = [argument.name for argument in macro.args]
    with_content: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            arguments = [*zip(names, call.args, strict=False)]
            arguments += [(keyword.key, keyword.value) for keyword in call.kwargs]
            with_content.update(name for name, value in arguments if _reads_content(_unwrap(value)))
    return with_content


def _unwrap(node: nodes.Node) -> nodes.Node:
    """The expression inside filters, tests and slices."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        if node.node is None:  # a filter block
            break
        node = node.node
    return node


def _reads_content(node: nodes.Node) -> bool:
    """Whether it is `X.content` or `X["content"]` of some variable X."""
    if isinstance(node, nodes.Getattr):
        return node.attr == "content" and isinstance(node.node, nodes.Name)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value == "content" and isinstance(node.node, nodes.Name)
    return False


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, with which templates mark the model's own text: the tag is ignored."""

    tags = {"generation"}  # noqa: RUF012, as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _make_environment() -> ImmutableSandboxedEnvironment:
    # the environment that transformers gives to chat templates
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    # a single date for the whole run: at midnight the prompts of running sessions must not change
    environment.globals["strftime_now"] = datetime.now().strftime
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
