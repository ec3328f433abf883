"""Sessions whose answers were sampled, with other ids than the tokenizer makes of their text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from sf_core.dataplane.chat.messages import assistant_message, call_id
from sf_core.dataplane.chat.tool_formats import ToolCall
from sf_core.dataplane.sessions.session import Prompt, Session
from sf_core.types import Chunk, FinishReason
from tests.bench.dataplane.conversations import generation_of, odd_ids
from tests.bench.dataplane.prompts.exceptions import Case
from tests.bench.dataplane.prompts.folders import renderer
from tests.bench.dataplane.prompts.references import Ids, open_prompt
from tests.bench.dataplane.prompts.shapes import Said, is_object


class Continued(NamedTuple):
    """A request after a sampled answer."""

    asked: Ids
    recorded: Ids
    """The prompt of that answer, and the answer."""
    new: Ids
    """What the server renders after the answer."""


def converse(case: Case, fresh: Callable[[Case], Ids | None], seed: int) -> Iterator[Continued]:
    """Hold the conversation turn by turn. `fresh` is the server's prompt of a request. It ends where that
    does not begin with the prompt before it, or the answer is not rendered as it was sampled."""
    made = renderer(case.kind, case.tokenizer)
    rng = random.Random(seed)
    session = Session("s")
    for at in range(len(case.shape.messages)):
        if case.shape.messages[at].role != "assistant":
            continue
        before = _up_to(case, at)
        if (prompt_ids := fresh(before)) is None:
            return
        prompt = open_prompt(case.kind, case.tokenizer, before.request, session)
        case = _with_our_ids(case, at, session.turn_id(prompt, prompt.num_samples))
        said = case.shape.messages[at]
        after = _up_to(case, _next_answer(case, at))
        if _moves_system(after):
            return
        whole = fresh(after)
        if whole is None or whole[: len(prompt_ids)] != prompt_ids:
            return
        start = len(prompt_ids)
        end = next((i for i in range(start, len(whole)) if whole[i] in made.stop_texts), None)
        if end is None or not _is_said(said, text := made.decode_with_special(whole[start:end])):
            return
        ids = [*odd_ids(made, text, rng), whole[end]]
        recorded = [*prompt.full_ids().tolist(), *ids]
        answer(session, prompt, ids, said)
        asked = open_prompt(case.kind, case.tokenizer, after.request, session)
        yield Continued(asked.full_ids().tolist(), recorded, whole[end + 1 :])


def continue_recorded(case: Case) -> tuple[Ids, Ids]:
    """The prompt of the whole conversation in a session that recorded its answers as their texts are, and the
    ids of the last answer with its prompt."""
    made = renderer(case.kind, case.tokenizer)
    session = Session("s")
    recorded = []
    for at, said in enumerate(case.shape.messages):
        if said.role == "assistant":
            prompt = open_prompt(case.kind, case.tokenizer, _up_to(case, at).request, session)
            ids = [*made.encode("".join(said.parts)).tolist(), made.stop_token_ids[0]]
            recorded = [*prompt.full_ids().tolist(), *ids]
            answer(session, prompt, ids, said)
    return open_prompt(case.kind, case.tokenizer, case.request, session).full_ids().tolist(), recorded


def answer(session: Session, prompt: Prompt, ids: Ids, said: Said) -> None:
    """Record an answer as the gateway does, when its parser has read it."""
    number = session.begin_sample(prompt, 0)
    generation = generation_of(prompt)
    generation.append(Chunk("r", ids, [-1.0] * len(ids), 0, FinishReason.STOP), "engine")
    calls = [ToolCall(call.name, json.loads(call.arguments)) for call in said.calls]
    turn_id = session.turn_id(prompt, number)
    message = assistant_message("".join(said.parts), calls, turn_id, said.reasoning)
    session.commit(generation, prompt, number, message, 0)


def _with_our_ids(case: Case, at: int, turn_id: str) -> Case:
    """The conversation with the ids that the calls of an answer get when it is sampled."""
    messages = list(case.shape.messages)
    ids = {call.call_id: call_id(turn_id, i) for i, call in enumerate(messages[at].calls)}
    calls = tuple(replace(call, call_id=ids[call.call_id]) for call in messages[at].calls)
    messages[at] = replace(messages[at], calls=calls)
    for i in range(at + 1, _next_answer(case, at)):
        answered = messages[i].answers
        messages[i] = replace(messages[i], answers=ids.get(answered, answered))
    return replace(case, shape=replace(case.shape, messages=tuple(messages)))


def _up_to(case: Case, num_messages: int) -> Case:
    return replace(case, shape=case.shape.beginning(num_messages))


def _next_answer(case: Case, at: int) -> int:
    roles = [said.role for said in case.shape.messages]
    return next((i for i in range(at + 1, len(roles)) if roles[i] == "assistant"), len(roles))


def _moves_system(case: Case) -> bool:
    """Whether a late system message becomes part of the first: another conversation begins."""
    is_late = any(said.role == "system" for said in case.shape.messages[1:])
    made = renderer(case.kind, case.tokenizer)
    return is_late and case.dialect == "messages" and made.templates.refuses_late_system


def _is_said(said: Said, text: str) -> bool:
    """Whether a rendered answer has all that it says, and is what a parser could have read."""
    if len(said.parts) > 1 or not all(is_object(call.arguments) for call in said.calls):
        return False
    saying = (*said.parts, said.reasoning, *(call.name for call in said.calls))
    return all(part.strip() in text for part in saying)
