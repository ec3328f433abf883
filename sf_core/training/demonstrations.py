"""Demonstrations of a warm start: which are shown in each step, and which of their tokens are trained."""

from __future__ import annotations

import hashlib
from binascii import a2b_base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt

from sf_core.config import RunConfig
from sf_core.dataplane.chat.messages import LeftOut, read_content
from sf_core.dataplane.chat.rendered import shows_whole_answer
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.sessions.images import SessionImages
from sf_core.environments.environment import Demonstration
from sf_core.environments.registry import environment_of
from sf_core.models.images.preprocess import preprocess_image
from sf_core.models.images.processor_config import ImageProcessorConfig
from sf_core.types import Ids, ImageSpan
from storage.files import read_bytes
from storage.json_files import json_lines

RATE_OF_BUILT_IN = 5e-3
"""Learning rate of the warm start of the built-in policy, unless it is named."""

DAMAGING_RATE = 3e-3
"""Learning rate of a warm start from which on it would ruin a pretrained model."""


@dataclass(frozen=True, slots=True)
class EncodedDemonstration:
    """A demonstration as tokens, one element of `said` for each."""

    demonstration: Demonstration
    token_ids: Ids
    is_answer: npt.NDArray[np.bool_]
    """Whether the assistant says the token: these are trained, end marks included."""
    images: Sequence[ImageSpan] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    """PNG files of the images by their hashes."""


def demonstrations(config: RunConfig, steps: range) -> list[list[Demonstration]]:
    """What each of these steps of the warm start shows. The environment's are for its first training tasks,
    each shown once; those of a file are shown again and again, in another order each time.

    Raises ValueError with one sentence if the file has none."""
    warm = config.policy.warmstart
    assert warm is not None
    size = warm.batch_size
    total = config.policy.warm_steps * warm.batch_size
    if warm.demonstrations is not None:
        listed = _read(warm.demonstrations)
        chosen = []
        for number in range(steps.start * size, steps.stop * size):
            round_, position = divmod(number, len(listed))
            order = _order(config.seed, len(listed), round_)
            chosen.append(listed[order[position]])
        return [chosen[first : first + size] for first in range(0, len(chosen), size)]
    environment = environment_of(config.environment)
    order = np.random.default_rng(config.seed).permutation(total).reshape(-1, size)
    batches = []
    for step in steps:
        demonstrations = [environment.demonstrate(int(index)) for index in order[step]]
        batches.append([demonstration for demonstration in demonstrations if demonstration is not None])
    return batches


@lru_cache(maxsize=4)
def _order(seed: int, length: int, round_: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng((seed, round_)).permutation(length)


def check_demonstrations(config: RunConfig) -> None:
    """Raises ValueError with one sentence if a warm start has nothing to show, or would ruin a model."""
    warm = config.policy.warmstart
    if warm is None or not config.policy.warm_steps:
        return
    if config.policy.model is not None:
        # a configuration of the built-in policy in which only the model was changed
        for name, value, least in (
            ("label_smoothing", warm.label_smoothing or None, 0.0),
            ("learning_rate", warm.learning_rate, DAMAGING_RATE),
        ):
            if value is not None and value >= least:
                raise ValueError(
                    f"policy.warmstart.{name} {value:g} is for the built-in policy and would damage a "
                    "pretrained model: leave it out, or set policy.warmstart to null"
                )
    if warm.demonstrations is None and not environment_of(config.environment).has_demonstrations:
        raise ValueError(
            f"policy.warmstart: the environment {config.environment.name} has no demonstrations: name a "
            "file with demonstrations (policy.warmstart.demonstrations), set policy.warmstart to null, or "
            "name a policy.model"
        )


def encode(renderer: Renderer, demonstration: Demonstration) -> EncodedDemonstration:
    """A demonstration as the policy would have produced it: every turn is encoded by itself, as in a session.

    Raises ValueError with one sentence if the chat template does not render what the assistant says, or an
    image cannot be shown."""
    ids: list[Ids] = []
    is_answer: list[npt.NDArray[np.bool_]] = []
    tools = demonstration.tools or []
    rendered = ""
    images = SessionImages()
    messages, files = _read_messages(demonstration.messages, renderer.image_processor)
    images.register(messages)

    def extend(count: int, text: str, by_assistant: bool) -> None:
        nonlocal rendered
        new = renderer.encode_behind_text(text) if rendered else renderer.encode(text)
        ids.append(
            new
            if by_assistant
            else images.placeholder_expander(messages[:count], renderer.image_processor)(new)
        )
        is_answer.append(np.full(len(ids[-1]), by_assistant))
        rendered += text

    def render_next(count: int) -> str:
        whole = renderer.render(messages[:count], tools)
        if not whole.startswith(rendered):
            raise ValueError("the template changes earlier messages when later messages are added")
        renderer.check_image_placeholders(whole, messages[:count])
        return whole[len(rendered) :]

    try:
        if (spelled := renderer.placeholder) is not None and any(map(spelled.is_in, [*messages, *tools])):
            raise ValueError(f"a text contains {spelled.text}, which is reserved for images")
        if tools and not renderer.shows_tools:
            raise ValueError("the template shows no tools")
        if tools and not renderer.tool_format:
            raise ValueError("the template writes tool calls in an unknown format")
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                extend(i, render_next(i), by_assistant=False)
                extend(i, _turn(renderer, render_next(i + 1), message), by_assistant=True)
    except (ValueError, jinja2.TemplateError) as error:
        raise ValueError(
            f"a demonstration cannot be used with the chat template of {renderer.model_dir}: {error}"
        ) from None
    if not any(part.any() for part in is_answer):
        raise ValueError("a demonstration cannot be used: the messages of the assistant are empty")
    token_ids = np.concatenate(ids)
    mask = np.concatenate(is_answer)
    if renderer.image_processor is None:
        return EncodedDemonstration(demonstration, token_ids, mask)
    token_ids, spans = images.read(token_ids, renderer.image_processor)
    return EncodedDemonstration(replace(demonstration, messages=messages), token_ids, mask, spans, files)


def _read_messages(
    messages: list[dict[str, Any]], image_processor: ImageProcessorConfig | None
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Messages in canonical form, and the PNG files of their images by their hashes, as the policy sees
    them."""
    files = dict[str, bytes]()
    left_out = LeftOut(is_multimodal=image_processor is not None)
    try:
        canonical = [
            message
            | {"content": read_content(message.get("content") or "", f"messages[{i}].content", left_out)}
            for i, message in enumerate(messages)
        ]
    except ApiError as error:
        raise ValueError(f"a demonstration cannot be used: {error}") from None
    for where, data, part in left_out.images:
        assert image_processor is not None
        try:
            fitted = preprocess_image(a2b_base64(data), image_processor)
        except ValueError as error:
            raise ValueError(f"a demonstration cannot be used: {where} has an image: {error}") from None
        sha256 = hashlib.sha256(fitted.png).hexdigest()
        files[sha256] = fitted.png
        part.update(sha256=sha256, width=fitted.width, height=fitted.height)
    return canonical, files


def _turn(renderer: Renderer, rest: str, message: dict[str, Any]) -> str:
    """The assistant's message with its end mark, at the beginning of a text."""
    ends = [at + len(stop) for stop in renderer.stop_texts.values() if (at := rest.find(stop)) >= 0]
    if not ends:
        raise ValueError("the template does not end the assistant's turn with an end mark of the policy")
    turn = rest[: min(ends)]
    if not shows_whole_answer(turn, message):
        missing = "calls" if message.get("tool_calls") else "words"
        raise ValueError(f"the template does not render the assistant's {missing}")
    return turn


@lru_cache(maxsize=4)
def _read(uri: str) -> list[Demonstration]:
    """The demonstrations of a JSONL file. Raises ValueError with one sentence."""
    try:
        content = read_bytes(uri)
    except FileNotFoundError:
        raise ValueError(f"policy.warmstart.demonstrations: {uri}: no such file") from None
    demonstrations = [_read_demonstration(where, row) for where, row in json_lines(uri, content)]
    if not demonstrations:
        raise ValueError(f"{uri}: has no demonstrations")
    return demonstrations


def _read_demonstration(where: str, row: Any) -> Demonstration:
    messages = row.get("messages") if isinstance(row, dict) else None
    if not (isinstance(messages, list) and all(isinstance(m, dict) and "role" in m for m in messages)):
        raise ValueError(f'{where}: expected {{"messages": [...]}}, each message with a role')
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(f"{where}: no message has the role assistant, so there is nothing to learn")
    return Demonstration(messages, row.get("tools"))
