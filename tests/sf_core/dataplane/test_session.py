from __future__ import annotations

import itertools
import shutil
from typing import Any

import numpy as np
import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from sf_core.dataplane.chat_request import parse_request
from sf_core.dataplane.export import export_session
from sf_core.dataplane.generation import Generation
from sf_core.dataplane.messages import Message, assistant_message
from sf_core.dataplane.rendering import Renderer
from sf_core.dataplane.session import Prompt, Session, Turn, turn_seed
from sf_core.dataplane.toolcalls import ToolCall
from sf_core.engines.scripted import scripted_logprob
from sf_core.types import Chunk, FinishReason, Sampling
from storage.schema import NOT_SAMPLED, Trajectory
from tests.sf_core.dataplane.stand import CALC, say


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def sample(
    session: Session,
    renderer: Renderer,
    messages: list[Message],
    ids: list[int],
    tools: list[dict[str, Any]] | None = None,
    *,
    version: int = 0,
    call: ToolCall | None = None,
) -> Turn:
    """One turn as the gateway would record it, answered with these ids."""
    prompt = session.open_prompt(messages, tools or [], renderer)
    prompt.num_samples += 1
    generation = Generation("r", prompt.full_ids(), Sampling(), 64, (), stream=False, floor=0)
    stopped = bool(ids) and ids[-1] in renderer.stop_token_ids
    reason = FinishReason.STOP if stopped else FinishReason.LENGTH
    logprobs = [scripted_logprob(token, i, version) for i, token in enumerate(ids)]
    generation.absorb(Chunk("r", ids, logprobs, version, reason), "engine")
    turn_id = f"{prompt.index}.{prompt.num_samples}"
    message = assistant_message(renderer.decode(ids), [call] if call else [], turn_id)
    session.commit(generation, prompt, message, 0)
    return session.turns[-1]


def export(session: Session, renderer: Renderer) -> list[Trajectory]:
    return export_session(
        session,
        policy="policy",
        group_id="g",
        stop_ids=renderer.stop_token_ids,
        task_id="t",
        environment="e",
        reward=1.0,
        reward_parts={},
    )


def test_the_next_turn_extends_the_recorded_ids(renderer: Renderer) -> None:
    session = Session("s")
    # these ids decode to text that encodes to other ids
    split = [renderer.encode(letter).tolist()[0] for letter in "the quick"]
    assert renderer.encode(renderer.decode(split)).tolist() != split
    stop = renderer.stop_token_ids[0]
    first = sample(session, renderer, [user("hi")], [*split, stop])
    messages = [user("hi"), first.message, user("go on")]
    prompt = session.open_prompt(messages, [], renderer)
    assert prompt.parent is first
    recorded = first.prompt.full_ids() + [*split, stop]
    tail = renderer.encode("\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n").tolist()
    assert prompt.full_ids() == recorded + tail
    assert renderer.render(messages, []) == renderer._tokenizer.decode(
        prompt.full_ids(), skip_special_tokens=False
    )


def test_a_turn_cut_by_its_budget_gets_its_end_as_a_token_that_was_not_sampled(renderer: Renderer) -> None:
    session = Session("s")
    first = sample(session, renderer, [user("hi")], renderer.encode("the quick").tolist())
    prompt = session.open_prompt([user("hi"), first.message, user("go on")], [], renderer)
    assert prompt.ids[0] == renderer.stop_token_ids[0]
    assert prompt.parent is first


def test_absent_content_and_other_spellings_of_arguments_are_the_same_message(renderer: Renderer) -> None:
    session = Session("s")
    call = ToolCall("calc", {"a": 1, "b": [2, 3]})
    first = sample(session, renderer, [user("hi")], say(renderer, ""), [CALC], call=call)
    [sent] = first.message["tool_calls"]
    function = {"name": "calc", "arguments": '{"b": [2,3], "a":1}'}
    echo = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [{"id": sent["id"], "type": "function", "function": function}],
    }
    result = {"role": "tool", "content": [{"type": "text", "text": "4"}], "tool_call_id": sent["id"]}
    messages = parse_request(orjson.dumps({"messages": [user("hi"), echo, result]})).messages
    assert session.open_prompt(messages, [CALC], renderer).parent is first


def test_branches_say_why_they_were_opened(renderer: Renderer) -> None:
    session = Session("s")
    system = {"role": "system", "content": "be brief"}
    first = sample(session, renderer, [system, user("a")], say(renderer, "one"))
    second = sample(session, renderer, [system, user("a"), first.message, user("b")], say(renderer, "two"))
    edited = {"role": "assistant", "content": "edited"}
    for messages, tools, reason in [
        ([system, user("a")], [], "asked_again"),
        ([system, user("a"), first.message, user("c")], [], "forked"),
        ([system, user("a"), edited, user("b")], [], "edited_history"),
        ([system, user("a"), first.message, user("b"), edited, user("c")], [], "edited_history"),
        ([system, user("a")], [CALC], "other_tools"),
        ([{"role": "system", "content": "be long"}, user("a")], [], "other_system"),
        ([system, user("summary of it all")], [], "new_conversation"),
    ]:
        before = session.branch_reasons[reason]
        sample(session, renderer, messages, say(renderer, "x"), tools)
        assert session.branch_reasons[reason] == before + 1, reason
    assert second.prompt.branch_reason is None
    assert session.branch_reasons.total() == 7


def test_a_turn_that_the_template_rewrites_is_left_at_its_last_common_turn(
    renderer: Renderer, tmp_path_factory: Any, model_dir: str
) -> None:
    folder = tmp_path_factory.mktemp("rewriting")
    shutil.copytree(model_dir, folder, dirs_exist_ok=True)
    template = (folder / "chat_template.jinja").read_text()
    # a note stands at the start while the conversation is short
    (folder / "chat_template.jinja").write_text("{% if messages | length < 4 %}note{% endif %}" + template)
    rewriting = Renderer(str(folder))
    session = Session("s")
    first = sample(session, rewriting, [user("a")], say(renderer, "one"))
    second = sample(session, rewriting, [user("a"), first.message, user("b")], say(renderer, "two"))
    messages = [user("a"), first.message, user("b"), second.message, user("c")]
    third = sample(session, rewriting, messages, say(renderer, "three"))
    assert (third.prompt.parent, third.prompt.branch_reason) == (None, "template_rewrote")
    assert third.prompt.full_ids() == renderer.encode(renderer.render(messages, [])).tolist()
    assert len(export(session, renderer)) == 2


def test_shared_turns_are_trained_in_the_first_branch_only(renderer: Renderer) -> None:
    session = Session("s")
    first = sample(session, renderer, [user("a")], say(renderer, "one"))
    sample(session, renderer, [user("a"), first.message, user("b")], say(renderer, "two"))
    sample(session, renderer, [user("a"), first.message, user("c")], say(renderer, "three"))
    sample(session, renderer, [user("a")], say(renderer, "again"))
    main, fork, retry = export(session, renderer)
    assert (main.parent_branch_id, main.shared_prefix) == (None, 0)
    assert (fork.parent_branch_id, fork.shared_prefix) == (main.branch_id, first.end)
    assert (retry.parent_branch_id, retry.shared_prefix) == (main.branch_id, first.prompt.end)
    assert not fork.loss_mask[: first.end].any()
    # a shared token keeps its log-prob and version
    assert np.array_equal(fork.logprobs[: first.end], main.logprobs[: first.end], equal_nan=True)
    assert [span.role for span in main.turns] == ["user", "assistant", "user", "assistant"]
    assert [main.turns[i].end for i in range(3)] == [main.turns[i + 1].start for i in range(3)]


def test_five_thousand_turns_are_no_problem(renderer: Renderer) -> None:
    session = Session("s")
    ids = say(renderer, "ok")
    parent = None
    for i in range(5000):
        # the requests would be long: it is the tree that is tested here
        start = parent.end if parent else 0
        prompt = Prompt(parent, renderer.encode("x"), [user("x")], 2 * i + 1, b"", i, start, 0, b"", None)
        turn = Turn(
            prompt,
            np.array(ids, np.int32),
            np.zeros(len(ids), np.float32),
            np.zeros(len(ids), np.int32),
            user("x"),
            FinishReason.STOP,
            "e",
            Sampling(),
            0,
            0,
        )
        session.turns.append(turn)
        parent = turn
    assert parent is not None
    [row] = export(session, renderer)
    assert row.loss_mask.sum() == 5000 * len(ids)


def test_the_seed_of_a_turn_depends_on_its_place_only() -> None:
    places = (("train", 0, 0), ("train", 0, 1))
    seeds = {turn_seed(*key) for key in itertools.product((0, 1), places, (0, 1), (0, 1))}
    assert len(seeds) == 16
    assert all(0 <= seed < 2**64 for seed in seeds)


OPERATIONS = ("continue", "again", "fork", "edit", "other_system", "tool_call")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_conversation_is_exported_bit_for_bit_and_trained_once(
    renderer: Renderer, data: st.DataObject
) -> None:
    """Invariants 1 to 3, whatever agents do to their histories. Sampled ids are random, so most answers would
    be encoded to other ids."""
    session = Session("s")
    vocabulary = st.integers(0, renderer._tokenizer.get_vocab_size() - 1)
    vocabulary = vocabulary.filter(lambda token: token not in renderer.stop_token_ids)
    conversations: list[list[Message]] = [[user("start")]]
    turns: list[tuple[list[int], Turn]] = []
    for number in range(data.draw(st.integers(1, 8))):
        messages = list(data.draw(st.sampled_from(conversations)))
        operation = data.draw(st.sampled_from(OPERATIONS))
        if operation == "fork":
            messages = messages[: data.draw(st.integers(0, len(messages)))] + [user(f"fork {number}")]
        elif operation == "edit":
            at = data.draw(st.integers(0, len(messages) - 1))
            messages[at] = {"role": messages[at]["role"], "content": f"edited {number}"}
            messages = messages[: at + 1] + [m for m in messages[at + 1 :] if m["role"] != "tool"]
            messages.append(user("and now?"))
        elif operation == "other_system":
            messages = [{"role": "system", "content": f"you are {number}"}, *messages]
        ids = data.draw(st.lists(vocabulary, max_size=12))
        ids += [renderer.stop_token_ids[0]] * data.draw(st.integers(0, 1))
        call = ToolCall("calc", {"n": number}) if operation == "tool_call" else None
        turn = sample(session, renderer, messages, ids, [CALC], version=number // 2, call=call)
        turns.append((turn.prompt.full_ids(), turn))
        answer = (
            {"role": "tool", "content": "42", "tool_call_id": turn.message["tool_calls"][0]["id"]}
            if call
            else user(f"next {number}")
        )
        conversations.append([*messages, turn.message, answer])
    rows = export(session, renderer)
    by_id = {row.branch_id: row for row in rows}
    assert sum(int(row.loss_mask.sum()) for row in rows) == sum(len(turn.ids) for _, turn in turns)
    for prompt_ids, turn in turns:
        start, end = len(prompt_ids), len(prompt_ids) + len(turn.ids)
        holding = [
            row
            for row in rows
            if row.token_ids[:start].tolist() == prompt_ids
            and np.array_equal(row.token_ids[start:end], turn.ids)
            and np.array_equal(row.logprobs[start:end], turn.logprobs)
            and np.array_equal(row.policy_versions[start:end], turn.versions)
        ]
        assert holding
        assert not len(turn.ids) or any(row.loss_mask[start:end].all() for row in holding)
    for row in rows:
        sampled = row.policy_versions != NOT_SAMPLED
        assert np.array_equal(sampled, ~np.isnan(row.logprobs))
        assert not (row.loss_mask & ~sampled).any()
        assert (np.diff(row.policy_versions[sampled]) >= 0).all()
        assert not row.loss_mask[: row.shared_prefix].any()
        assert [span.start for span in row.turns[1:]] == [span.end for span in row.turns[:-1]]
        assert row.turns[-1].end == len(row.token_ids)
        if row.parent_branch_id is not None:
            parent = by_id[row.parent_branch_id]
            shared = slice(row.shared_prefix)
            assert np.array_equal(parent.token_ids[shared], row.token_ids[shared])
