from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from sf_core.config import PolicyConfig
from sf_core.environments.calculator import CALCULATOR
from sf_core.models.builtin import (
    CALL_END,
    CALL_START,
    CHARACTERS,
    IMAGE_PAD,
    MAX_IMAGE_TOKENS,
    PHRASES,
    TURN_END,
    VIDEO_PAD,
    make_policy,
    make_tokenizer,
)
from sf_core.models.images.processor_config import ImageProcessorConfig, read_image_processor

CONFIG = PolicyConfig(hidden_size=64, num_layers=2)
TOKENIZER = make_tokenizer()

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 47*83?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "calc", "arguments": {"expression": "47*83"}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_0", "content": "3901"},
    {"role": "assistant", "content": " It is 3901. \n"},
    {"role": "user", "content": "Thanks"},
]


@pytest.fixture(scope="module")
def builtin_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make_policy(str(folder), CONFIG, seed=3)
    return folder


def render(count: int, **options: object) -> str:
    text = TOKENIZER.apply_chat_template(CONVERSATION[:count], tokenize=False, **options)
    assert isinstance(text, str)
    return text


pieces = st.sampled_from([*CHARACTERS, *PHRASES, CALL_START, CALL_END, TURN_END])


@given(st.lists(pieces).map("".join))
def test_text_comes_back_from_its_ids_unchanged(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


def test_a_character_outside_the_alphabet_is_unknown() -> None:
    assert TOKENIZER.encode("é", add_special_tokens=False) == [TOKENIZER.unk_token_id]


def test_prompts_of_the_quickstart_are_short() -> None:
    prompt = render(2, tools=[CALCULATOR.schema], add_generation_prompt=True)
    assert len(TOKENIZER.encode(prompt, add_special_tokens=False)) < 32


def test_marks_of_a_tool_call_survive_decoding_that_drops_special_tokens() -> None:
    call = "<tool_call>calc 1+1</tool_call>"
    ids = TOKENIZER.encode(call + TURN_END, add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == call


@pytest.mark.parametrize("tools", [None, [CALCULATOR.schema]])
def test_a_rendering_extends_the_rendering_of_its_prefix(tools: list[object] | None) -> None:
    whole = render(len(CONVERSATION), tools=tools)
    for count, following in enumerate(CONVERSATION[1:], start=1):
        options = {"tools": tools, "add_generation_prompt": following["role"] == "assistant"}
        assert whole.startswith(render(count, **options))


def test_a_conversation_with_tools_is_rendered_verbatim() -> None:
    assert render(len(CONVERSATION), tools=[CALCULATOR.schema], add_generation_prompt=True) == (
        "<|im_start|>tools\ncalc<|im_end|>\n"
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is 47*83?<|im_end|>\n"
        "<|im_start|>assistant\n<tool_call>calc 47*83</tool_call><|im_end|>\n"
        "<|im_start|>tool\n3901<|im_end|>\n"
        "<|im_start|>assistant\n It is 3901. \n<|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_folder_loads_with_the_auto_classes(builtin_policy: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(builtin_policy)
    model = AutoModelForCausalLM.from_pretrained(builtin_policy)
    assert tokenizer.init_kwargs["tool_format"] == "plain"
    assert tokenizer.chat_template == TOKENIZER.chat_template
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == model.config.eos_token_id
    assert model.config.vocab_size == len(tokenizer)


def test_the_weights_are_a_function_of_the_seed(builtin_policy: Path, tmp_path: Path) -> None:
    def weights(path: Path) -> torch.Tensor:
        return AutoModelForCausalLM.from_pretrained(path).model.embed_tokens.weight

    make_policy(str(tmp_path / "same"), CONFIG, seed=3)
    make_policy(str(tmp_path / "other"), CONFIG, seed=4)
    assert torch.equal(weights(builtin_policy), weights(tmp_path / "same"))
    assert not torch.equal(weights(builtin_policy), weights(tmp_path / "other"))


def test_the_default_policy_has_about_a_million_parameters(tmp_path: Path) -> None:
    make_policy(str(tmp_path), PolicyConfig(), seed=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert 0.9e6 < model.num_parameters() < 1.1e6


@pytest.fixture(scope="module")
def multimodal_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    make_policy(str(folder), PolicyConfig(sees=True, hidden_size=64, num_layers=2), seed=3)
    return folder


def test_a_multimodal_policy_loads_with_the_auto_classes(multimodal_policy: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(multimodal_policy)
    model = AutoModelForImageTextToText.from_pretrained(multimodal_policy)
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert model.config.text_config.vocab_size == len(tokenizer)
    ids = tokenizer.convert_tokens_to_ids([IMAGE_PAD, VIDEO_PAD])
    assert ids == [model.config.image_token_id, model.config.video_token_id]
    assert read_image_processor(str(multimodal_policy)) == ImageProcessorConfig(
        ids[0], 28, 4 * 28**2, MAX_IMAGE_TOKENS * 28**2
    )


def test_a_text_policy_has_no_image_placeholder(builtin_policy: Path) -> None:
    assert read_image_processor(str(builtin_policy)) is None
    assert IMAGE_PAD not in TOKENIZER.get_vocab()


@pytest.mark.parametrize("tools", [None, [CALCULATOR.schema]])
def test_images_are_shown_where_they_stand(tools: list[object] | None) -> None:
    image = {"type": "image", "sha256": "0" * 64, "width": 56, "height": 56}
    seeing = make_tokenizer(is_multimodal=True)
    marks = "<|vision_start|><|image_pad|><|vision_end|>"
    text = seeing.apply_chat_template(
        [
            {"role": "user", "content": [{"type": "text", "text": "Look: "}, image, image]},
            *CONVERSATION[2:3],
            {"role": "tool", "tool_call_id": "call_0", "content": [image]},
        ],
        tools=tools,
        tokenize=False,
    )
    assert text == (
        ("<|im_start|>tools\ncalc<|im_end|>\n" if tools else "")
        + f"<|im_start|>user\nLook: {marks}{marks}<|im_end|>\n"
        "<|im_start|>assistant\n<tool_call>calc 47*83</tool_call><|im_end|>\n"
        f"<|im_start|>tool\n{marks}<|im_end|>\n"
    )
    for count in range(1, len(CONVERSATION) + 1):
        whole = seeing.apply_chat_template(CONVERSATION[:count], tools=tools, tokenize=False)
        assert whole == render(count, tools=tools)
