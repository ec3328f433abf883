from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sf_core.config import PolicyConfig, RunConfig
from sf_core.dataplane.chat.renderer import Renderer, open_renderer
from sf_core.environments.environment import Demonstration
from sf_core.environments.quickstart import Quickstart
from sf_core.environments.screen.environment import ScreenOfButtons
from sf_core.models.builtin import make_policy
from sf_core.training.demonstrations import check_demonstrations, demonstrations, encode
from tests.bench.dataplane.prompts.folders import renderer
from tests.bench.refusals import check_sentence


def warmed(steps: int, size: int, **more: Any) -> RunConfig:
    warm = {"steps": steps, "batch_size": size, **more}
    return RunConfig.model_validate({"policy": {"warmstart": warm}})


def written(folder: Path, *lines: str) -> str:
    path = folder / "shown.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def line(text: str) -> str:
    asked = {"role": "user", "content": "?"}
    said = {"role": "assistant", "content": text}
    return json.dumps({"messages": [asked, said]})


@given(st.integers(1, 7), st.integers(1, 5), st.integers(1, 5))
def test_a_file_is_shown_whole_before_any_of_it_is_shown_again(
    tmp_path_factory: pytest.TempPathFactory, lines: int, steps: int, size: int
) -> None:
    path = written(tmp_path_factory.mktemp("shown"), *(line(str(number)) for number in range(lines)))
    config = warmed(steps, size, demonstrations=path)
    batches = demonstrations(config, range(steps))
    assert [len(batch) for batch in batches] == [size] * steps
    said = [shown.messages[1]["content"] for batch in batches for shown in batch]
    counts = Counter(said)
    assert max(counts.values()) - min(counts[str(number)] for number in range(lines)) <= 1
    for first in range(0, len(said) - lines + 1, lines):
        assert len(set(said[first : first + lines])) == lines
    parts = [demonstrations(config, range(step, step + 1))[0] for step in range(steps)]
    assert parts == batches


def test_an_environment_shows_each_of_its_first_tasks_once() -> None:
    config = warmed(3, 4)
    environment = Quickstart()
    shown = [json.dumps(one.messages) for batch in demonstrations(config, range(3)) for one in batch]
    assert sorted(shown) == sorted(json.dumps(environment.demonstrate(i).messages) for i in range(12))


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], "has no demonstrations"),
        ([line("a"), "{"], "line 2: not valid JSON"),
        (["[]"], 'line 1: expected {"messages": [...]}'),
        (['{"messages": [{"content": "a"}]}'], "line 1: expected"),
        (['{"messages": [{"role": "user", "content": "a"}]}'], "line 1: no message has the role assistant"),
    ],
)
def test_a_file_that_cannot_be_shown_is_named_with_its_line(
    tmp_path: Path, lines: list[str], reason: str
) -> None:
    config = warmed(1, 1, demonstrations=written(tmp_path, *lines))
    with pytest.raises(ValueError) as refused:
        demonstrations(config, range(1))
    check_sentence(str(refused.value), str(tmp_path / "shown.jsonl"), reason)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = warmed(1, 1, demonstrations=f"{tmp_path}/none.jsonl")
    with pytest.raises(ValueError, match=r"policy\.warmstart\.demonstrations: .*none\.jsonl: no such file"):
        demonstrations(config, range(1))


def test_a_file_takes_the_place_of_demonstrations_that_an_environment_lacks(tmp_path: Path) -> None:
    bare = {"environment": {"name": "instructions"}}
    with pytest.raises(ValueError) as refused:
        check_demonstrations(RunConfig.model_validate(bare))
    check_sentence(str(refused.value), "policy.warmstart", "instructions", "policy.warmstart.demonstrations")
    named = {"warmstart": {"demonstrations": written(tmp_path, line("a"))}}
    check_demonstrations(RunConfig.model_validate(bare | {"policy": named}))


def test_a_model_is_warmed_up_only_for_steps_that_are_named() -> None:
    def steps(**policy: Any) -> int:
        return PolicyConfig.model_validate(policy).warm_steps

    assert steps() == 250 and steps(warmstart=None) == 0 and steps(warmstart={"steps": 3}) == 3
    assert steps(model="m") == 0 and steps(model="m", warmstart={"batch_size": 2}) == 0
    assert steps(model="m", warmstart={"steps": 3}) == 3


@pytest.mark.parametrize("setting", [{"label_smoothing": 0.1}, {"learning_rate": 5e-3}])
def test_a_configuration_of_the_built_in_policy_ruins_no_model(setting: dict[str, float]) -> None:
    config = warmed(3, 4, **setting)
    check_demonstrations(config)
    policy = config.policy.model_copy(update={"model": "m"})
    with pytest.raises(ValueError) as refused:
        check_demonstrations(config.model_copy(update={"policy": policy}))
    check_sentence(
        str(refused.value), f"policy.warmstart.{next(iter(setting))}", "would damage a pretrained model"
    )


PLAIN = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


def with_template(folder: Path, template: str) -> Renderer:
    make_policy(str(folder), PolicyConfig(hidden_size=32, num_layers=1), seed=0)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return open_renderer(str(folder))


CALL = Quickstart().demonstrate(1)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (PLAIN, "shows no tools"),
        (TOOLS + PLAIN, "does not render the assistant's calls"),
        (PLAIN.replace("<|im_end|>\n", "\n"), "does not end the assistant's turn with an end mark"),
        ("{{ messages | length }}" + PLAIN, "changes earlier messages when later messages are added"),
        ("{{ raise_exception('no such role') }}" + PLAIN, "no such role"),
    ],
)
def test_a_template_that_cannot_show_a_demonstration_is_named(
    tmp_path: Path, template: str, reason: str
) -> None:
    calls = "tools" in reason or "calls" in reason
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]
    shown = CALL if calls else Demonstration(said + said)
    with pytest.raises(ValueError) as refused:
        encode(with_template(tmp_path, template), shown)
    check_sentence(str(refused.value), "a demonstration cannot be used", str(tmp_path), reason)


@pytest.mark.parametrize("tokenizer", ["byte_level", "first", "never"])
def test_what_is_shown_has_the_ids_of_the_whole_text(tokenizer: str) -> None:
    """No turn begins with a space that a tokenizer puts before a text."""
    made = renderer("smollm3", tokenizer)
    messages = [
        {"role": role, "content": text}
        for role, text in (
            ("user", "the dog"),
            ("assistant", "a fox"),
            ("user", "more"),
            ("assistant", "quick"),
        )
    ]
    shown = encode(made, Demonstration(messages))
    said = made.decode_with_special(shown.token_ids[shown.is_answer].tolist())
    assert said == "a fox<|im_end|>quick<|im_end|>"
    whole = made.encode(made.render(messages, [])).tolist()
    assert shown.token_ids.tolist() == whole[: len(shown.token_ids)]


@pytest.fixture(scope="module")
def multimodal_renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = tmp_path_factory.mktemp("seeing")
    make_policy(str(folder), PolicyConfig(sees=True, hidden_size=32, num_layers=1), seed=0)
    return open_renderer(str(folder))


def test_what_is_shown_has_a_placeholder_for_each_token_of_an_image(multimodal_renderer: Renderer) -> None:
    demonstration = ScreenOfButtons().demonstrate(0)
    shown = encode(multimodal_renderer, demonstration)
    assert shown.token_ids.size == shown.is_answer.size
    first, second = shown.images
    assert (first.length, first.height, first.width) == (16, 112, 112)
    image_processor = multimodal_renderer.image_processor
    places = np.flatnonzero(shown.token_ids == image_processor.token_id)
    assert places.tolist() == [*range(first.start, first.start + 16), *range(second.start, second.start + 16)]
    assert not shown.is_answer[places].any()
    assert {sha256: hashlib.sha256(png).hexdigest() for sha256, png in shown.files.items()} == {
        span.sha256: span.sha256 for span in shown.images
    }
    calls = [message["tool_calls"][0] for message in demonstration.messages if "tool_calls" in message]
    said = "".join(
        f"<tool_call>click {call['function']['arguments']['at']}</tool_call><|im_end|>" for call in calls
    )
    assert multimodal_renderer.decode_with_special(shown.token_ids[shown.is_answer].tolist()) == said
    # what is kept names images
    kept = json.dumps(shown.demonstration.messages)
    assert "base64" not in kept and all(span.sha256 in kept for span in shown.images)


def asked(*parts: Any) -> Demonstration:
    return Demonstration(
        [{"role": "user", "content": [*parts]}, {"role": "assistant", "content": "a"}],
    )


BROKEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def test_an_image_that_cannot_be_shown_is_named(multimodal_renderer: Renderer, tmp_path: Path) -> None:
    blind = with_template(tmp_path, PLAIN)
    far = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    for renderer_, part, reason in (
        (blind, BROKEN, "messages[0].content has a part that is not text"),
        (multimodal_renderer, BROKEN, "messages[0].content[0] has an image: the image is broken"),
        (multimodal_renderer, far, "messages[0].content[0] has an image whose bytes are not in the request"),
    ):
        with pytest.raises(ValueError) as refused:
            encode(renderer_, asked(part))
        check_sentence(str(refused.value), "a demonstration cannot be used", reason)
