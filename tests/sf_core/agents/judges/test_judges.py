"""What reward functions get of judges, and what is recorded of it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import pytest

from sf_core.agents.judges import client as client_module
from sf_core.agents.judges.client import RefusedError
from sf_core.agents.judges.judges import Judge, Judges, Record, endpoint_of, takes_judges, weigh_words
from sf_core.config.rollout_config import JudgeConfig
from sf_core.types import Endpoint, NotJudged
from storage.tables.judgements import Judgement
from tests.bench import judge_server
from tests.bench.waits import patience

Asking = Callable[[Mapping[str, Judge]], Awaitable[Any]]


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[judge_server.JudgeServer]:
    with judge_server.JudgeServer(getattr(request, "param", ())).serving() as served:
        yield served


async def ask(
    server: judge_server.JudgeServer, *several: Asking, **settings: Any
) -> tuple[list[Any], list[Judgement]]:
    """What each returns, or the error that it raises, and what is recorded of all; each is a scoring of its
    own with the same judges."""
    config = JudgeConfig(url=server.url, **settings)
    results = list[Any]()
    judgements = list[Judgement]()
    async with Judges({"taste": config}, {"taste": endpoint_of("taste", config)}) as judges:
        for one in several:
            with judges.record() as (given, record):
                results += await asyncio.gather(one(given), return_exceptions=True)
            judgements += record.judgements
    return results, judgements


async def test_a_question_is_answered_by_the_model_that_the_server_lists(
    server: judge_server.JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SF_JUDGE_KEY_TASTE", "secret")
    [mark], [row] = await ask(server, lambda judges: judges["taste"].ask("How good?", "style", read=int))
    assert mark == len("How good?")
    assert server.keys == ["Bearer secret"]
    assert server.requests == [
        {
            "model": judge_server.MODEL,
            "temperature": 0.0,
            "messages": [{"role": "user", "content": "How good?"}],
        }
    ]
    assert row.seconds > 0
    assert row == Judgement(
        judge="taste",
        item="style",
        messages='[{"role":"user","content":"How good?"}]',
        reply="9",
        verdict="9",
        tokens=10,
        seconds=row.seconds,
        attempts=1,
    )
    assert "secret" not in str(row)


async def test_words_are_weighed_by_the_log_probs_of_the_first_token(
    server: judge_server.JudgeServer,
) -> None:
    questions = ["is 42 right?", "is 41 right?"]
    chosen, rows = await ask(server, *(lambda j, q=q: j["taste"].choose(q, ["yes", "no"]) for q in questions))
    assert [one["yes"] for one in chosen] == [pytest.approx(0.8 / 0.9), pytest.approx(0.1 / 0.9)]
    assert [sum(one.values()) for one in chosen] == [pytest.approx(1.0)] * 2
    assert server.requests[0] | {"messages": 0, "model": 0} == {
        "temperature": 0.0,
        "max_tokens": 1,
        "logprobs": True,
        "top_logprobs": 20,
        "messages": 0,
        "model": 0,
    }
    assert json.loads(rows[0].verdict or "") == chosen[0]


def test_tokens_count_for_the_word_that_alone_begins_with_them() -> None:
    likely = {" inc": -1.0, "In": -2.0, "correct": -1.5, "": -0.1, "  ": -0.1, "the": -0.1}
    weights = weigh_words(likely, ["Correct", "Incorrect"])
    assert weights["Correct"] == pytest.approx(1 / (1 + 2.718281828**0.5 + 2.718281828**-0.5))
    assert weigh_words({"c": -1.1, "co": -1.0, "ca": -1.0}, ["Correct", "Cautious"]) == {
        "Correct": 0.5,
        "Cautious": 0.5,
    }
    with pytest.raises(
        ValueError, match=r"^none of the 1 most likely tokens of the reply begins one of the words yes, no$"
    ):
        weigh_words({"the": -0.1}, ["yes", "no"])


def test_words_are_compared_without_case_and_space_around_them() -> None:
    assert weigh_words({" YES": -0.1}, [" yes", "No "]) == {" yes": 1.0, "No ": 0.0}


def test_words_of_which_most_begin_alike_cannot_be_told_apart() -> None:
    with pytest.raises(
        ValueError,
        match=r"^the first token of the judge's reply is .* the words polite, police, so the words cannot ",
    ):
        weigh_words({"pol": -0.1, "polite": -5.0}, ["polite", "police"])


@pytest.mark.parametrize("words", [["no", "not sure"], ["Yes", "yes"], ["yes", " "]])
async def test_words_that_one_token_never_tells_apart_are_refused(
    server: judge_server.JudgeServer, words: list[str]
) -> None:
    async def choose(judges: Mapping[str, Judge]) -> Any:
        return await judges["taste"].choose("?", words)

    [error], rows = await ask(server, choose)
    assert isinstance(error, ValueError) and not rows
    assert str(error).startswith(f"the method choose cannot distinguish {words[0]!r}, {words[1]!r}: ")


@pytest.mark.parametrize(
    ("second", "found"),
    [({"A": 0.5, "B": 0.5}, 0.5), ({"A": 0.9, "B": 0.1}, 0.0), ({"A": 0.1, "B": 0.9}, 1.0)],
)
async def test_an_order_that_cannot_decide_leaves_it_to_the_other(
    server: judge_server.JudgeServer, monkeypatch: pytest.MonkeyPatch, second: dict[str, float], found: float
) -> None:
    orders = [{"A": 0.5, "B": 0.5}, second]

    async def choose(*_: Any) -> dict[str, float]:
        return orders.pop(0)

    monkeypatch.setattr(Judge, "_choose", choose)
    assert (await ask(server, lambda judges: judges["taste"].prefer("?", "a", "b")))[0] == [found]


async def test_a_preference_is_asked_in_both_orders(server: judge_server.JudgeServer) -> None:
    def preferring(a: str, b: str) -> Asking:
        return lambda judges: judges["taste"].prefer("Why?", a, b, "depth")

    # of equally long texts it likes the second
    found, rows = await ask(
        server, preferring("long", "no"), preferring("no", "long"), preferring("ab", "cd")
    )
    assert found == [1.0, 0.0, 0.5]
    pairs = [row.pair for row in rows]
    assert pairs[::2] == pairs[1::2] and len(set(pairs)) == 3
    assert {row.item for row in rows} == {"depth"}


async def test_a_plain_function_waits_in_its_thread(server: judge_server.JudgeServer) -> None:
    def reward(judges: Mapping[str, Judge]) -> float:
        return float(judges["taste"].ask("12345", read=float)) + judges["taste"].prefer("?", "aa", "b")

    [total], rows = await ask(server, lambda judges: asyncio.to_thread(reward, judges))
    assert (total, len(rows)) == (6.0, 3)


async def test_a_function_with_a_loop_of_its_own_waits_in_it(server: judge_server.JudgeServer) -> None:
    async def inside(judges: Mapping[str, Judge]) -> Any:
        return await judges["taste"].ask("123", read=int)

    [mark], _ = await ask(server, lambda judges: asyncio.to_thread(lambda: asyncio.run(inside(judges))))
    assert mark == 3


async def twice(judges: Mapping[str, Judge]) -> list[Any]:
    return await asyncio.gather(*(judges["taste"].ask("same") for _ in range(2)))


async def test_an_equal_question_is_asked_once_at_temperature_0(server: judge_server.JudgeServer) -> None:
    _, rows = await ask(server, twice, twice)
    assert len(server.requests) == 1
    assert [(row.cached, row.attempts, row.tokens) for row in rows] == [(False, 1, 10), *[(True, 0, 0)] * 3]


async def test_an_equal_question_is_asked_again_at_another_temperature(
    server: judge_server.JudgeServer,
) -> None:
    _, rows = await ask(server, twice, temperature=0.5)
    assert len(server.requests) == 2
    assert not any(row.cached for row in rows)


# --- which replies are verdicts

REASONS = {
    "length while it thinks": "length",
    "reasoning in tags": "reasoning",
    "reasoning without an end": "reasoning",
    "blank": "empty",
    "no end": "other",
}
"""Why replies of NO_VERDICTS are none, where that is not their name."""


def read_score(text: str) -> int:
    """What a stranger's function does with any text that it is given."""
    return int(re.findall(r"\d+", text or "0")[-1])


@pytest.mark.parametrize("server", [[kind] for kind in judge_server.NO_VERDICTS], indirect=True)
async def test_a_reply_that_did_not_end_with_an_answer_is_never_a_verdict(
    server: judge_server.JudgeServer,
) -> None:
    asking: Asking = lambda judges: judges["taste"].ask("How good?", read=read_score)  # noqa: E731
    errors, rows = await ask(server, asking, asking)
    assert [type(error) for error in errors] == [NotJudged] * 2
    assert all(f"judge taste at {server.url} gives no verdict: " in str(error) for error in errors)
    # it is known of none that it was asked before
    assert len(server.requests) == 2 * client_module.TRIES
    [kind] = {reason for row in rows for reason in row.discarded}
    assert kind in {*REASONS.values(), *judge_server.NO_VERDICTS}
    for row in rows:
        assert (row.reply, row.verdict, row.cached) == (None, None, False)
        assert row.discarded == [kind] * row.attempts == [kind] * client_module.TRIES
        assert row.tokens == 10 * row.attempts, "replies that do not count cost what others do"


@pytest.mark.parametrize("kind", judge_server.NO_VERDICTS)
async def test_the_question_is_asked_again_until_a_reply_is_a_verdict(kind: str) -> None:
    with judge_server.JudgeServer([kind, ""]).serving() as server:
        asking: Asking = lambda judges: judges["taste"].ask("How good?", read=read_score)  # noqa: E731
        marks, [first, known] = await ask(server, asking, asking)
    assert marks == [9, 9]
    assert len(server.requests) == 2
    reason = REASONS.get(kind, kind)
    assert (first.reply, first.attempts, first.discarded) == ("9", 2, [reason])
    assert first.tokens == 20
    assert (known.cached, known.discarded, known.tokens) == (True, [], 0)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("length", "the reply was cut off: raise environment.judges.taste.max_tokens, or the server's own "),
        ("content_filter", "a content filter of the server cut off the reply"),
        ("refusal", "the judge refused to answer"),
        ("tool_calls", "the reply calls a tool"),
        ("reasoning", "the reply has reasoning and no answer"),
        ("empty", "the reply is empty"),
        ("no end", "the server does not say that the reply ended by itself (`finish_reason` is not `stop`)"),
    ],
)
async def test_an_error_says_why_the_last_reply_was_no_verdict(kind: str, sentence: str) -> None:
    with judge_server.JudgeServer([kind]).serving() as server:
        [error], _ = await ask(server, lambda judges: judges["taste"].ask("?"))
    assert f"gives no verdict: {sentence}" in str(error)


@pytest.mark.parametrize("kind", [kind for kind in judge_server.NO_VERDICTS if not kind.startswith("length")])
async def test_words_are_weighed_of_no_reply_that_is_no_answer(kind: str) -> None:
    with judge_server.JudgeServer([kind, ""]).serving() as server:
        [chosen], [row] = await ask(
            server, lambda judges: judges["taste"].choose("is 42 right?", ["yes", "no"])
        )
    assert chosen["yes"] == pytest.approx(0.8 / 0.9)
    assert row.discarded == [REASONS.get(kind, kind)]


async def test_a_reply_of_one_token_that_begins_to_reason_is_no_choice(
    server: judge_server.JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    likely = [{"token": "<think>", "logprob": -0.001}, {"token": "yes", "logprob": -9.0}]
    reply = {
        "finish_reason": "length",
        "message": {"content": None},
        "logprobs": {"content": [{"token": "<think>", "top_logprobs": likely}]},
    }
    monkeypatch.setattr("tests.bench.judge_server.answer", lambda body, _: {"choices": [reply]})
    [error], [row] = await ask(server, lambda judges: judges["taste"].choose("?", ["yes", "no"]))
    assert isinstance(error, NotJudged)
    assert row.discarded == ["reasoning"] * client_module.TRIES


async def test_words_are_weighed_where_the_likeliest_token_is_white_space(
    server: judge_server.JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    likely = [{"token": "\n\n", "logprob": -0.7}, {"token": "Yes", "logprob": -1.2}]
    reply = {
        "finish_reason": "length",
        "message": {"content": "\n\n"},
        "logprobs": {"content": [{"token": "\n\n", "top_logprobs": likely}]},
    }
    monkeypatch.setattr("tests.bench.judge_server.answer", lambda body, _: {"choices": [reply]})
    [chosen], [row] = await ask(server, lambda judges: judges["taste"].choose("?", ["yes", "no"]))
    assert chosen == {"yes": 1.0, "no": 0.0}
    assert (row.attempts, row.discarded) == (1, [])


@pytest.mark.parametrize(
    "content",
    [
        "<think>1 or 2?</think>\n\n7",
        "1 or 2?</think>7",
        [{"type": "thinking"}, {"type": "text", "text": "7"}],
    ],
)
async def test_reasoning_before_an_answer_is_not_read(
    server: judge_server.JudgeServer, monkeypatch: pytest.MonkeyPatch, content: Any
) -> None:
    reply = {"finish_reason": "stop", "message": {"content": content}}
    monkeypatch.setattr("tests.bench.judge_server.answer", lambda body, _: {"choices": [reply]})
    [mark], [row] = await ask(server, lambda judges: judges["taste"].ask("?", read=int))
    assert (mark, row.reply) == (7, "7")


async def test_a_limit_of_the_reply_is_sent_only_if_it_is_set(server: judge_server.JudgeServer) -> None:
    await ask(server, lambda judges: judges["taste"].ask("?"))
    await ask(server, lambda judges: judges["taste"].ask("?"), max_tokens=300)
    assert [request.get("max_tokens") for request in server.requests] == [None, 300]


AWAY = "judge taste at {url} does not answer: "


@pytest.mark.parametrize(
    ("server", "why"),
    [([503], "told to fail"), ([408], "told to fail"), ([429], "told to fail")]
    + [(["broken"], "the judge's reply is not JSON"), (["slow"], "no reply within 0.2 s")],
    indirect=["server"],
)
async def test_a_judge_that_does_not_answer_does_not_judge(
    server: judge_server.JudgeServer, why: str
) -> None:
    timeout_s = 0.2 if "0.2" in why else patience()
    [error], [row] = await ask(server, lambda judges: judges["taste"].ask("?"), timeout_s=timeout_s)
    assert isinstance(error, NotJudged)
    assert str(error) == AWAY.format(url=server.url) + why
    assert len(server.requests) == client_module.TRIES
    assert (row.reply, row.verdict, row.attempts, row.tokens) == (None, None, client_module.TRIES, 0)


async def test_a_server_that_is_gone_does_not_judge() -> None:
    server = judge_server.JudgeServer()
    server.server.server_close()
    [error], _ = await ask(server, lambda judges: judges["taste"].ask("?"))
    assert isinstance(error, NotJudged)
    assert str(error).startswith(AWAY.format(url=server.url))


@pytest.mark.parametrize("server", [[500, 429, ""]], indirect=True)
async def test_a_judge_that_fails_is_asked_again(server: judge_server.JudgeServer) -> None:
    [reply], [row] = await ask(server, lambda judges: judges["taste"].ask("123"))
    assert (reply, row.attempts, row.tokens) == ("3", 3, 10)


@pytest.mark.parametrize("server", [[401]], indirect=True)
async def test_a_judge_that_refuses_is_no_matter_of_patience(server: judge_server.JudgeServer) -> None:
    [error], rows = await ask(server, lambda judges: judges["taste"].ask("?"))
    assert isinstance(error, RefusedError)
    assert str(error) == f"judge taste at {server.url} refused the request with status 401: told to fail"
    assert (len(server.requests), rows) == (1, [])


async def test_a_judge_whose_tokens_are_not_told_cannot_be_held_to_a_budget(
    server: judge_server.JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = {"choices": [{"finish_reason": "stop", "message": {"content": "yes"}}]}
    monkeypatch.setattr("tests.bench.judge_server.answer", lambda body, _: reply)
    [error], _ = await ask(server, lambda judges: judges["taste"].ask("?"), max_tokens_per_iteration=1000)
    assert isinstance(error, RefusedError)
    assert str(error) == (
        "the server of judge taste does not report `usage`, so "
        "environment.judges.taste.max_tokens_per_iteration cannot be enforced"
    )


@pytest.mark.parametrize("server", [[401]], indirect=True)
async def test_a_key_that_a_server_tells_is_in_no_error(
    server: judge_server.JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SF_JUDGE_KEY_TASTE", "told")
    [error], _ = await ask(server, lambda judges: judges["taste"].ask("?"))
    assert str(error).endswith("refused the request with status 401: its key to fail")


@pytest.mark.parametrize("server", [["garbage", ""]], indirect=True)
async def test_what_cannot_be_read_is_asked_once_more(server: judge_server.JudgeServer) -> None:
    [mark], rows = await ask(server, lambda judges: judges["taste"].ask("123", read=int))
    assert mark == 3
    assert [(row.reply, row.verdict) for row in rows] == [("as an AI", None), ("3", "3")]


@pytest.mark.parametrize("server", [["garbage"]], indirect=True)
async def test_what_cannot_be_read_twice_is_not_judged(server: judge_server.JudgeServer) -> None:
    [error], rows = await ask(server, lambda judges: judges["taste"].ask("123", read=int))
    assert isinstance(error, NotJudged)
    assert str(error).startswith("the reply of judge taste cannot be read: 'as an AI' (ValueError: ")
    assert [row.verdict for row in rows] == [None, None]
    assert len(server.requests) == 2


@pytest.mark.parametrize("server", [["garbage"]], indirect=True)
async def test_words_that_no_token_begins_cannot_be_read(server: judge_server.JudgeServer) -> None:
    [error], rows = await ask(server, lambda judges: judges["taste"].choose("?", ["yes", "no"]))
    assert "none of the 2 most likely tokens of the reply begins one of the words yes, no" in str(error)
    assert isinstance(error, NotJudged) and len(rows) == 2


async def test_a_judge_without_log_probs_cannot_choose(
    server: judge_server.JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tests.bench.judge_server.answer",
        lambda body, _: {"choices": [{"finish_reason": "stop", "message": {"content": "yes"}}]},
    )
    [error], _ = await ask(server, lambda judges: judges["taste"].choose("?", ["yes", "no"]))
    assert str(error) == "judge taste returns no log-probs, which `choose` needs"


async def unknown(judges: Mapping[str, Judge]) -> Any:
    return judges["test"]


async def test_an_unknown_name_lists_those_that_there_are(server: judge_server.JudgeServer) -> None:
    [error], _ = await ask(server, unknown)
    assert isinstance(error, ValueError)
    assert str(error) == "unknown judge 'test'; use one of taste (environment.judges)"


async def test_a_function_that_was_given_up_asks_nobody(server: judge_server.JudgeServer) -> None:
    with Judges({}, {}).record() as (_, record):
        pass
    with pytest.raises(NotJudged, match=r"^the time limit for scoring the answer .* is over$"):
        await Judge(None, record).ask("?")  # type: ignore[arg-type]


def test_a_judge_says_where_it_is() -> None:
    config = JudgeConfig(url="http://h:1/v1", name="big")
    assert endpoint_of("taste", config) == Endpoint("http://h:1/v1", "", "big")


def test_judges_are_given_to_functions_that_have_a_parameter_for_them() -> None:
    assert takes_judges(lambda task, answer, judges: 0.0)
    assert not takes_judges(lambda task, answer: 0.0)
    assert not takes_judges(Record.__init__)
