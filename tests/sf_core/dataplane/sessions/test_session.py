from __future__ import annotations

import itertools
import json
import shutil
from copy import deepcopy
from pathlib import Path
from random import Random

import numpy as np

from sf_core.dataplane.api_schemas import FinishBody
from sf_core.dataplane.chat.messages import Message, assistant_message, extend_chain
from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.chat.tool_formats import ToolCall
from sf_core.dataplane.gateway.dialects.chat import Chat
from sf_core.dataplane.sessions.export import export_session
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.sessions.turn_events import RecordedTurn, TurnKey
from sf_core.dataplane.turns.sampling import derive_seed
from sf_core.engines.scripted import scripted_logprob
from sf_core.types import Chunk, FinishReason, Sampling
from storage.tables.schema import NOT_SAMPLED, Trajectory
from tests.bench.dataplane import conversations, planes


def export(session: Session, renderer: Renderer) -> list[Trajectory]:
    report = FinishBody(status="finished", reward=1.0, task_id="t", environment="e")
    stop_ids = renderer.stop_token_ids
    return export_session(session, report, policy="policy", group_id="g", stop_ids=stop_ids)


def test_the_next_turn_extends_the_recorded_ids(renderer: Renderer) -> None:
    session = Session("s")
    # these ids decode to text that encodes to other ids
    split = [renderer.encode(letter).tolist()[0] for letter in "the quick"]
    assert renderer.encode(renderer.decode(split)).tolist() != split
    stop = renderer.stop_token_ids[0]
    first = conversations.sample(session, renderer, [conversations.user("hi")], [*split, stop])
    messages = [conversations.user("hi"), first.message, conversations.user("go on")]
    prompt = session.open_prompt(messages, [], renderer)
    assert prompt.parent is first
    recorded = first.prompt.full_ids().tolist() + [*split, stop]
    tail = renderer.encode("\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n").tolist()
    assert prompt.full_ids().tolist() == recorded + tail
    assert renderer.render(messages, []) == renderer._tokenizer.decode(
        prompt.full_ids().tolist(), skip_special_tokens=False
    )


def test_a_turn_cut_by_its_budget_gets_its_end_as_a_token_that_was_not_sampled(renderer: Renderer) -> None:
    session = Session("s")
    first = conversations.sample(
        session, renderer, [conversations.user("hi")], renderer.encode("the quick").tolist()
    )
    prompt = session.open_prompt(
        [conversations.user("hi"), first.message, conversations.user("go on")], [], renderer
    )
    assert prompt.ids[0] == renderer.stop_token_ids[0]
    assert prompt.parent is first


def test_absent_content_and_other_spellings_of_arguments_are_the_same_message(renderer: Renderer) -> None:
    session = Session("s")
    call = ToolCall("calc", {"a": 1, "b": [2, 3]})
    first = conversations.sample(
        session, renderer, [conversations.user("hi")], planes.say(renderer, ""), [planes.CALC], call=call
    )
    [sent] = first.message["tool_calls"]
    function = {"name": "calc", "arguments": '{"b": [2,3], "a":1}'}
    echo = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [{"id": sent["id"], "type": "function", "function": function}],
    }
    result = {"role": "tool", "content": [{"type": "text", "text": "4"}], "tool_call_id": sent["id"]}
    messages = Chat().parse({"messages": [conversations.user("hi"), echo, result]}, session)[0].messages
    assert session.open_prompt(messages, [planes.CALC], renderer).parent is first


def test_an_answer_that_comes_back_with_a_name_is_the_recorded_one(model_dir: str, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    template = tmp_path / "chat_template.jinja"
    template.write_text(
        template.read_text(encoding="utf-8").replace(
            "{{ message.role }}", "{{ message.name or message.role }}"
        ),
        encoding="utf-8",
    )
    session = Session("s")
    renderer = Renderer(str(tmp_path))
    example = [conversations.user("x"), {"role": "assistant", "content": "y", "name": "coder"}]
    first = conversations.sample(
        session, renderer, [*example, conversations.user("a")], planes.say(renderer, "one")
    )
    named = first.message | {"name": "coder"}
    second = conversations.sample(
        session,
        renderer,
        [*example, conversations.user("a"), named, conversations.user("b")],
        planes.say(renderer, "two"),
    )
    third = session.open_prompt(
        [
            *example,
            conversations.user("a"),
            named,
            conversations.user("b"),
            second.message | {"name": "coder"},
            conversations.user("c"),
        ],
        [],
        renderer,
    )
    assert (second.prompt.parent, third.parent, session.branch_reasons.total()) == (first, second, 0)
    # a message that was not sampled has the name that it was given
    assert conversations.shown(renderer, third.full_ids().tolist()).count("coder") == 1
    other = session.open_prompt(
        [conversations.user("x"), example[1] | {"name": "tester"}, conversations.user("a")], [], renderer
    )
    assert "tester" in conversations.shown(renderer, other.full_ids().tolist())


def test_branches_say_why_they_were_opened(renderer: Renderer) -> None:
    session = Session("s")
    system = {"role": "system", "content": "be brief"}
    first = conversations.sample(
        session, renderer, [system, conversations.user("a")], planes.say(renderer, "one")
    )
    second = conversations.sample(
        session,
        renderer,
        [system, conversations.user("a"), first.message, conversations.user("b")],
        planes.say(renderer, "two"),
    )
    edited = {"role": "assistant", "content": "edited"}
    for messages, tools, reason in [
        ([system, conversations.user("a")], [], "asked_again"),
        ([system, conversations.user("a"), first.message, conversations.user("c")], [], "forked"),
        ([system, conversations.user("a"), edited, conversations.user("b")], [], "edited_history"),
        (
            [
                system,
                conversations.user("a"),
                first.message,
                conversations.user("b"),
                edited,
                conversations.user("c"),
            ],
            [],
            "edited_history",
        ),
        ([system, conversations.user("a")], [planes.CALC], "other_tools"),
        ([{"role": "system", "content": "be long"}, conversations.user("a")], [], "other_system"),
        ([system, conversations.user("summary of it all")], [], "new_conversation"),
    ]:
        before = session.branch_reasons[reason]
        conversations.sample(session, renderer, messages, planes.say(renderer, "x"), tools)
        assert session.branch_reasons[reason] == before + 1, reason
    assert second.prompt.branch_reason is None
    assert session.branch_reasons.total() == 7


def test_what_a_template_rewrites_forks_where_the_tokens_part() -> None:
    record = conversations.Record(conversations.family("qwen3"))
    session = record.session
    renderer = record.renderer
    thought = conversations.odd_ids(renderer, "<think>\nwhy\n</think>\n\nsaid", Random(1))
    first = record.answer(
        session.open_prompt([conversations.user("a")], [conversations.FIND], renderer), thought
    )
    messages = [conversations.user("a"), first.message, conversations.user("b")]
    second = session.open_prompt(messages, [conversations.FIND], renderer)
    assert second.branch_reason == "template_rewrote"
    assert (second.parent, second.start) == (first.prompt, first.prompt.end)
    assert conversations.shown(renderer, second.full_ids().tolist()) == renderer.render(
        messages, [conversations.FIND]
    )
    record.answer(second, renderer.encode("done").tolist())
    main, fork = conversations.check(record)
    assert (fork.parent_branch_id, fork.shared_prefix) == (main.branch_id, first.prompt.end)


def test_reasoning_between_tool_calls_stays_and_goes_with_the_next_question() -> None:
    record = conversations.Record(conversations.family("qwen3"))
    session = record.session
    renderer = record.renderer
    messages = [conversations.user("a")]
    for x in range(3):
        text = f"<think>\nwhy {x}\n</think>\n\nsaid"
        turn = record.answer(
            session.open_prompt(messages, [conversations.FIND], renderer), renderer.encode(text).tolist()
        )
        assert turn.prompt.branch_reason is None
        messages = [*messages, turn.message, {"role": "tool", "content": f"{x}", "tool_call_id": "c"}]
    asked = session.open_prompt([*messages, conversations.user("b")], [conversations.FIND], renderer)
    assert asked.branch_reason == "template_rewrote"
    assert conversations.shown(renderer, asked.full_ids().tolist()) == renderer.render(
        [*messages, conversations.user("b")], [conversations.FIND]
    )


def test_a_template_is_given_answers_with_what_the_agent_left_out() -> None:
    record = conversations.Record(conversations.family("qwen3"))
    session = record.session
    renderer = record.renderer
    messages: list[Message] = [conversations.user("a")]
    for x in range(6):
        prompt = session.open_prompt(messages, [conversations.FIND], renderer)
        text = f"<think>\nwhy\n</think>\n\n{conversations.call_text('qwen3', x)}"
        call = ToolCall("find", {"x": x})
        turn = record.answer(prompt, renderer.encode(text).tolist(), calls=[call], reasoning="why")
        assert turn.prompt.branch_reason is None
        call_id = turn.message["tool_calls"][0]["id"]
        sent = {name: value for name, value in turn.message.items() if name != "reasoning_content"}
        # where the identity of messages leaves reasoning out, this is found
        session._answers[extend_chain(prompt.chain, sent)] = turn
        messages = [*messages, sent, {"role": "tool", "content": f"{x}", "tool_call_id": call_id}]
    assert len(conversations.check(record)) == 1


def test_a_forced_beginning_is_part_of_the_prompt_and_of_the_answer() -> None:
    record = conversations.Record(conversations.family("qwen3"))
    session = record.session
    renderer = record.renderer
    plain = session.open_prompt([conversations.user("a")], [conversations.FIND], renderer)
    text = conversations.call_text("qwen3", 1)
    forced = text[:25]
    rest = text[25:]
    prompt = session.open_prompt([conversations.user("a")], [conversations.FIND], renderer, forced)
    assert prompt is not plain
    assert prompt is session.open_prompt([conversations.user("a")], [conversations.FIND], renderer, forced)
    assert prompt.full_ids().tolist() == plain.full_ids().tolist() + renderer.encode(forced).tolist()
    turn = record.answer(prompt, renderer.encode(rest).tolist(), calls=[ToolCall("find", {"x": 1})])
    result = {"role": "tool", "content": "4", "tool_call_id": turn.message["tool_calls"][0]["id"]}
    following = session.open_prompt(
        [conversations.user("a"), turn.message, result], [conversations.FIND], renderer
    )
    assert following.parent is turn
    assert not conversations.check(record)[0].loss_mask[: prompt.end].any()


def test_a_prompt_of_ids_goes_on_from_the_longest_recorded_line() -> None:
    record = conversations.Record(conversations.family("chatml"))
    session = record.session
    renderer = record.renderer
    turn = record.answer(session.open_prompt([conversations.user("a")], [], renderer), [7, 8, 9])
    line = turn.prompt.full_ids().tolist() + turn.ids.tolist()
    following = session.open_prompt_from_ids([*line, 5, 6])
    assert (following.parent, following.ids.tolist(), following.branch_reason) == (turn, [5, 6], None)
    assert following.full_ids().tolist() == [*line, 5, 6]
    assert session.open_prompt_from_ids([*line, 5, 6]) is following
    record.answer(following, [4])
    other = session.open_prompt_from_ids([*line[:-2], 3])
    assert (other.parent, other.start, other.branch_reason) == (turn, len(line) - 2, "retokenised")
    record.answer(other, [2])
    unrelated = session.open_prompt_from_ids([3, 3])
    assert (unrelated.parent, unrelated.branch_reason) == (None, "new_conversation")
    assert session.open_prompt_from_ids(line[:2]).full_ids().tolist() == line[:2]
    conversations.check(record)


def test_numbers_that_python_calls_equal_are_different_calls() -> None:
    record = conversations.Record(conversations.family("qwen3"))
    session = record.session
    renderer = record.renderer
    turn = record.answer(
        session.open_prompt([conversations.user("a")], [conversations.FIND], renderer),
        renderer.encode(conversations.call_text("qwen3", 1)).tolist(),
        calls=[ToolCall("find", {"x": 1})],
    )
    result = {"role": "tool", "content": "4", "tool_call_id": turn.message["tool_calls"][0]["id"]}
    assert (
        session.open_prompt(
            [conversations.user("a"), turn.message, result], [conversations.FIND], renderer
        ).parent
        is turn
    )
    edited = deepcopy(turn.message)
    edited["tool_calls"][0]["function"]["arguments"]["x"] = True
    prompt = session.open_prompt([conversations.user("a"), edited, result], [conversations.FIND], renderer)
    assert prompt.branch_reason == "edited_history"
    assert '"x": true' in conversations.shown(renderer, prompt.full_ids().tolist())


def test_the_finish_reason_of_a_turn_is_that_of_the_engine(renderer: Renderer) -> None:
    session = Session("s")
    cut = conversations.sample(
        session, renderer, [conversations.user("a")], renderer.encode("the quick").tolist()
    )
    conversations.sample(
        session,
        renderer,
        [conversations.user("a"), cut.message, conversations.user("b")],
        planes.say(renderer, "two"),
    )
    [row] = export(session, renderer)
    assert [span.finish_reason for span in row.turns] == [None, "length", None, "stop"]


def test_shared_turns_are_trained_in_the_first_branch_only(renderer: Renderer) -> None:
    session = Session("s")
    first = conversations.sample(session, renderer, [conversations.user("a")], planes.say(renderer, "one"))
    conversations.sample(
        session,
        renderer,
        [conversations.user("a"), first.message, conversations.user("b")],
        planes.say(renderer, "two"),
    )
    conversations.sample(
        session,
        renderer,
        [conversations.user("a"), first.message, conversations.user("c")],
        planes.say(renderer, "three"),
    )
    conversations.sample(session, renderer, [conversations.user("a")], planes.say(renderer, "again"))
    main, fork, retry = export(session, renderer)
    assert (main.parent_branch_id, main.shared_prefix) == (None, 0)
    header = len(renderer.encode("\n<|im_start|>user\n"))
    assert (fork.parent_branch_id, fork.shared_prefix) == (main.branch_id, first.end + header)
    assert (retry.parent_branch_id, retry.shared_prefix) == (main.branch_id, first.prompt.end)
    assert not fork.loss_mask[: first.end].any()
    # every sampled token once, the first behind a fork with the others
    sampled = [len(planes.say(renderer, text)) for text in ("one", "two", "three", "again")]
    assert main.loss_mask.sum() == sampled[0] + sampled[1]
    assert [fork.loss_mask.sum(), retry.loss_mask.sum()] == sampled[2:]
    # a shared token keeps its log-prob and version
    assert np.array_equal(fork.logprobs[: first.end], main.logprobs[: first.end], equal_nan=True)
    assert [span.role for span in main.turns] == ["user", "assistant", "user", "assistant"]
    assert [main.turns[i].end for i in range(3)] == [main.turns[i + 1].start for i in range(3)]


def test_a_row_has_what_was_sampled_where_it_was_sampled(renderer: Renderer) -> None:
    """A turn that new weights went on with, by value."""
    session = Session("s")
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5)
    prompt = session.open_prompt([conversations.user("a")], [], renderer)
    generation = conversations.generation_of(prompt, sampling)
    ids = [7, 9, 8, renderer.stop_token_ids[0]]
    generation.append(Chunk("r", ids[:1], [-0.5], 3, FinishReason.ABORT), "e0")
    generation.append(Chunk("r", ids[1:], [-2.5, -0.25, -1.5], 4, FinishReason.STOP), "e1")
    session.commit(generation, prompt, session.begin_sample(prompt, 0), assistant_message("x", [], "t"), 0)
    following = session.open_prompt(
        [conversations.user("a"), session.turns[0].message, conversations.user("b")], [], renderer
    )
    assert following.version == 4
    [row] = export(session, renderer)
    start = prompt.end
    given = prompt.full_ids().tolist()
    assert row.token_ids.tolist() == given + ids
    assert row.loss_mask.tolist() == [False] * start + [True] * 4
    assert row.logprobs[start:].tolist() == [-0.5, -2.5, -0.25, -1.5] and np.isnan(row.logprobs[:start]).all()
    assert row.policy_versions.tolist() == [NOT_SAMPLED] * start + [3, 4, 4, 4]
    [_, span] = row.turns
    assert (span.start, span.end, span.engine) == (start, start + 4, "e0,e1")
    assert (span.temperature, span.top_p, span.top_k) == (0.7, 0.9, 5)


def test_turns_whose_answer_nobody_got_are_not_trained(renderer: Renderer) -> None:
    session = Session("s")
    first = conversations.sample(session, renderer, [conversations.user("a")], planes.say(renderer, "one"))
    messages = [conversations.user("a"), first.message, conversations.user("b")]
    unanswered = conversations.sample(session, renderer, messages, planes.say(renderer, "two"))
    key = TurnKey("s", unanswered.prompt.index, unanswered.sample)
    session.recorded.append(RecordedTurn(key, b"", unanswered.prompt, turn=unanswered, undelivered=True))
    cut = conversations.generation_of(unanswered.prompt)
    cut.append(Chunk("r", [7, 8], [-1.0, -1.0], 0, FinishReason.ABORT), "engine")
    session.abandon(cut, unanswered.prompt, 1, assistant_message("", [], "t"))
    assert session.abandon_undelivered() == 1
    [row] = export(session, renderer)
    assert row.token_ids.tolist() == [*first.prompt.full_ids(), *first.ids.tolist()]
    assert [turn.ids.tolist() for turn in session.abandoned] == [[7, 8], unanswered.ids.tolist()]


def test_the_seed_of_a_turn_depends_on_its_place_and_on_what_failed_there() -> None:
    places = (("train", 0, 0), ("train", 0, 1))
    seeds = {derive_seed(*key) for key in itertools.product((0, 1), places, (0, 1), (0, 1), (0, 1, 2))}
    assert len(seeds) == 48
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_a_row_has_the_tools_of_its_requests(renderer: Renderer) -> None:
    session = Session("s")
    first = conversations.sample(
        session, renderer, [conversations.user("a")], planes.say(renderer, "x"), [planes.CALC]
    )
    conversations.sample(
        session,
        renderer,
        [conversations.user("a"), first.message, conversations.user("b")],
        planes.say(renderer, "y"),
        [planes.CALC],
    )
    conversations.sample(session, renderer, [conversations.user("c")], planes.say(renderer, "z"))
    assert [row.tools and json.loads(row.tools) for row in export(session, renderer)] == [[planes.CALC], None]


def test_where_the_tools_change_a_branch_begins_though_the_tokens_go_on() -> None:
    renderer = conversations.family("chatml")  # its template shows no tools
    record = conversations.Record(renderer)
    messages: list[Message] = [conversations.user("a")]
    for tools in ([conversations.FIND], [conversations.FIND, planes.CALC], []):
        prompt = record.session.open_prompt(messages, tools, renderer)
        messages = [
            *messages,
            record.answer(prompt, renderer.encode("x").tolist()).message,
            conversations.user("b"),
        ]
    record.restart()
    rows = conversations.check(record)
    assert [json.loads(row.tools or "[]") for row in rows] == [
        [conversations.FIND],
        [conversations.FIND, planes.CALC],
        [],
    ]
    assert [row.shared_prefix for row in rows] == [0, len(rows[0].token_ids), len(rows[1].token_ids)]
    assert [int(row.loss_mask.sum()) for row in rows] == [2, 2, 2]


def test_after_a_restart_a_second_conversation_is_known_as_one(renderer: Renderer) -> None:
    record = conversations.Record(renderer)
    first = conversations.user("one")
    record.answer(record.session.open_prompt([first], [], renderer), renderer.encode("x").tolist())
    session = record.replayed()
    system = {"role": "system", "content": "be brief"}
    asked = [[conversations.user("other")], [first, conversations.user("and")], [system, first]]
    reasons = [session.open_prompt(messages, [], renderer).branch_reason for messages in asked]
    assert reasons == ["other_system", "new_conversation", "other_system"]
    assert session.open_prompt([first], [planes.CALC], renderer).branch_reason == "other_tools"


def test_messages_that_share_a_span_give_it_the_role_they_have_in_common(renderer: Renderer) -> None:
    session = Session("s")
    system = {"role": "system", "content": "be brief"}
    answer = {"role": "assistant", "content": "given"}
    conversations.sample(
        session,
        renderer,
        [system, conversations.user("a"), answer, conversations.user("b")],
        planes.say(renderer, "x"),
    )
    conversations.sample(
        session,
        renderer,
        [system, conversations.user("a"), answer, conversations.user("c")],
        planes.say(renderer, "y"),
    )
    whole, forked = export(session, renderer)
    assert [span.role for span in whole.turns] == ["system", "user", "assistant", "user", "assistant"]
    assert [span.role for span in forked.turns] == ["prompt", "prompt", "assistant"]


def test_branches_that_fork_inside_an_abandoned_turn_share_what_the_longest_of_them_has(
    renderer: Renderer,
) -> None:
    session = Session("s")

    def answer(asked: list[int], ids: list[int], *, is_given_up: bool = False) -> None:
        prompt = session.open_prompt_from_ids(asked)
        generation = conversations.generation_of(prompt)
        logprobs = [scripted_logprob(token, i, 0) for i, token in enumerate(ids)]
        generation.append(Chunk("r", ids, logprobs, 0, FinishReason.LENGTH), "engine")
        number = session.begin_sample(prompt, 0)
        message = assistant_message("", [], f"{asked}")
        if is_given_up:
            session.abandon(generation, prompt, number, message)
        else:
            session.commit(generation, prompt, number, message, 0)

    answer([*range(1, 11)], [50], is_given_up=True)
    answer([*range(1, 6), 90], [100])
    answer([*range(1, 9), 91], [101])
    answer([*range(1, 9), 91, 101, 0, 92], [102])
    answer([*range(1, 9), 91, 101, 0, 93], [103])
    rows = export(session, renderer)
    assert [row.shared_prefix for row in rows] == [0, 5, 11]
    assert [row.token_ids.tolist()[-1] for row in rows] == [100, 102, 103]
    # each answer trains in one branch
    trained = [row.token_ids[row.loss_mask].tolist() for row in rows]
    assert trained == [[100], [101, 102], [103]]


def test_what_follows_a_fork_inside_a_constrained_turn_trains(renderer: Renderer) -> None:
    session = Session("s")

    def answer(asked: list[int], ids: list[int], grammar: str = "") -> None:
        prompt = session.open_prompt_from_ids(asked)
        generation = conversations.generation_of(prompt, grammar=grammar)
        logprobs = [scripted_logprob(token, i, 0) for i, token in enumerate(ids)]
        generation.append(Chunk("r", ids, logprobs, 0, FinishReason.LENGTH), "engine")
        number = session.begin_sample(prompt, 0)
        session.commit(generation, prompt, number, assistant_message("", [], str(number)), 0)

    answer([5, 6], [10, 11, 12, 13], grammar="g")
    # leaves the first answer after two of its tokens
    answer([5, 6, 10, 11, 20], [30, 31])
    rows = {tuple(row.token_ids.tolist()): row.loss_mask.tolist() for row in export(session, renderer)}
    assert rows[5, 6, 10, 11, 20, 30, 31] == [False] * 5 + [True] * 2
