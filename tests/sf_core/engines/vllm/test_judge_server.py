"""Judges on this machine's loopback, asked by the openai client: a small policy judges."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import openai
import pytest

from sf_core.config.rollout_config import JudgeConfig
from sf_core.engines.vllm import judge_server
from sf_core.engines.vllm.judge_server import serve_judges
from sf_core.types import Endpoint
from tests.bench.refusals import check_sentence
from tests.bench.waits import wait_until
from tests.sf_core.engines.vllm.small_policies import servers

pytestmark = pytest.mark.system

QUESTION = "Is the answer polite? Answer yes or no."


def client_of(endpoint: Endpoint, key: str | None = None) -> openai.OpenAI:
    return openai.OpenAI(base_url=endpoint.base_url, api_key=key or endpoint.api_key, max_retries=0)


def ask(endpoint: Endpoint) -> list[tuple[str, float]]:
    """The likeliest first tokens of the reply, with their log-probs."""
    reply = client_of(endpoint).chat.completions.create(
        model=endpoint.model,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=1,
        temperature=0,
        logprobs=True,
        top_logprobs=5,
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    return [(token.token, round(token.logprob, 4)) for token in logprobs.content[0].top_logprobs]


# judges that fail are in tests/sf_core/agents/judges/test_failing_judge.py
@pytest.mark.nightly
def test_a_judge_answers_who_has_the_key_and_is_back_after_a_kill(
    vllm: str, small_policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    judge = JudgeConfig(model=small_policy, concurrency=2)
    before = servers()
    with serve_judges({"a": (judge, small_policy)}) as endpoints:
        [one] = endpoints.values()
        said = ask(one)
        assert len(said) == 5 and one.model == "a"
        assert one.base_url.startswith("http://127.0.0.1:")
        with pytest.raises(openai.AuthenticationError):
            client_of(one, "none").models.list()
        # read before a kill, which ends the others too
        commands = {process: process.cmdline() for process in servers()}
        # others on this machine see command lines
        assert not any(one.api_key in word for words in commands.values() for word in words)
        port = f"--port={one.base_url.rpartition(':')[2].partition('/')[0]}"
        with caplog.at_level(logging.WARNING):
            for process in [process for process, words in commands.items() if port in words]:
                process.kill()
            wait_until(lambda: "judge a: the vLLM of this judge has ended" in caplog.text)
            wait_until(lambda: is_back(one))
        assert ask(one) == said and one.api_key not in caplog.text
    assert servers() <= before


def is_back(endpoint: Endpoint) -> bool:
    try:
        client_of(endpoint).models.list()
    except openai.APIConnectionError:
        return False
    return True


@pytest.mark.nightly
def test_a_judge_that_does_not_start_is_told_with_the_end_of_its_log(
    vllm: str, small_policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(small_policy, tmp_path / "broken")
    config = tmp_path / "broken" / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text(encoding="utf-8")) | {"model_type": "nothing"}),
        encoding="utf-8",
    )
    judges = {"a": (JudgeConfig(model=str(config.parent)), str(config.parent))}
    monkeypatch.setattr(judge_server, "_MAX_FAILED_STARTS", 1)
    before = servers()
    told = r"^judge a: vLLM ended before it served .*broken:\n"
    with pytest.raises(RuntimeError, match=told), serve_judges(judges):
        raise AssertionError
    assert servers() <= before


def test_without_judges_nothing_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SF_VLLM_PYTHON", "/nowhere/python")
    with serve_judges({}) as endpoints:
        assert endpoints == {}
    with pytest.raises(FileNotFoundError) as refused, serve_judges({"a": (JudgeConfig(model="/j"), "/j")}):
        raise AssertionError
    check_sentence(str(refused.value), "/nowhere/python")
