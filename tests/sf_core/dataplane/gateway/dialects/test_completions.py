"""OpenAI Completions with the `openai` client against a served data plane."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import OpenAI

from sf_core.dataplane.chat.renderer import Renderer
from tests.bench.dataplane import planes
from tests.bench.waits import patience


def complete(plane: planes.ServedPlane, prompt: Any, session_id: str | None = None, **options: Any) -> Any:
    base = plane.url if session_id is None else f"{plane.url}/sessions/{session_id}"
    with OpenAI(
        base_url=f"{base}/v1", api_key=plane.agent_key(session_id), max_retries=0, timeout=patience()
    ) as agent:
        answer = agent.completions.create(model="policy", prompt=prompt, **options)
        return list(answer) if options.get("stream") else answer


def test_texts_and_token_ids_are_continued_as_they_are(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, " lazy dog"))
    ids = renderer.encode("the quick").tolist()
    for prompt in ("the quick", ids):
        answer = complete(served_plane, prompt)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" lazy dog", "stop")
        assert served_plane.asked[-1].prompt_ids == ids
        assert answer.usage.prompt_tokens == len(ids)
        assert answer.usage.completion_tokens == len(planes.say(renderer, " lazy dog"))


def test_several_prompts_and_samples_are_several_turns(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(lambda prompt, seed: planes.say(renderer, f"{len(prompt)} {seed}"))
    one = renderer.encode("the").tolist()
    two = renderer.encode("the quick brown").tolist()
    answer = complete(served_plane, [one, two], n=2, seed=5)
    expected = [f"{len(one)} 5", f"{len(one)} 6", f"{len(two)} 5", f"{len(two)} 6"]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == len(one) + len(two)
    chunks = complete(
        served_plane, [one, two], n=2, seed=5, stream=True, stream_options={"include_usage": True}
    )
    texts = ["", "", "", ""]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.text
    assert texts == expected
    assert chunks[-1].usage == answer.usage


def test_ids_that_repeat_a_recorded_turn_extend_it(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "fox"))
    [claim] = served_plane.claim()
    first = renderer.encode("the quick brown").tolist()
    complete(served_plane, first, claim["session_id"])
    complete(served_plane, [*first, *planes.say(renderer, "fox"), *first], claim["session_id"])
    tree = served_plane.get(f"/sessions/{claim['session_id']}")
    assert [prompt["parent_turn"] for prompt in tree["prompts"]] == [None, 0]
    assert [prompt["num_new_tokens"] for prompt in tree["prompts"]] == [len(first), len(first)]


def test_a_stop_string_ends_the_answer_before_it(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    served_plane.connect(planes.answering(renderer, "one two three"))
    assert complete(served_plane, "x", stop=["three"]).choices[0].text == "one two "


def test_log_probs_come_with_the_places_of_their_texts(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    served_plane.register()
    text = "one 🦊 trois été"
    served_plane.connect(planes.answering(renderer, text))
    [choice] = complete(served_plane, "x", logprobs=0, max_tokens=32).choices
    whole = choice.logprobs
    assert whole.tokens[-1] == "<|im_end|>" and "".join(whole.tokens[:-1]) == text
    places = zip(whole.tokens[:-1], whole.text_offset, strict=False)
    assert [text[at : at + len(token)] for token, at in places] == whole.tokens[:-1]
    assert whole.text_offset[-1] == len(text)
    chunks = complete(served_plane, "x", logprobs=0, max_tokens=32, stream=True)
    parts = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert [offset for part in parts for offset in part.text_offset] == whole.text_offset


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prompt": [1_000_000]}, "Token ids must be from 0 to"),
        ({"echo": True}, "echo is not supported"),
        ({"prompt": "the " * 3000}, "maximum context length is 2048 tokens"),
    ],
)
def test_bad_requests_get_a_sentence(
    served_plane: planes.ServedPlane, change: dict[str, Any], sentence: str
) -> None:
    served_plane.register()
    body = {"model": "policy", "prompt": "x"} | change
    response = httpx.post(f"{served_plane.url}/v1/completions", json=body)
    assert (response.status_code, sentence in response.json()["error"]["message"]) == (400, True)
