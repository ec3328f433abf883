from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from sf_core.config import PolicyConfig, RunConfig, WarmstartConfig
from sf_core.dataplane.chat.renderer import Renderer, open_renderer
from sf_core.environments.quickstart import Quickstart
from sf_core.environments.screen.environment import ScreenOfButtons
from sf_core.models.builtin import make_policy, make_tokenizer
from sf_core.training.demonstrations import encode
from sf_core.training.packing.trie import Packing, pack
from sf_core.training.torch.network import Network
from sf_core.training.warmstart import MultimodalLearner, learning_rate, row_of, warmstart

TOKENIZER = make_tokenizer()
ENVIRONMENT = Quickstart()


@pytest.fixture(scope="module")
def policy_renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = str(tmp_path_factory.mktemp("policy"))
    make_policy(folder, PolicyConfig(hidden_size=32, num_layers=1), seed=0)
    return open_renderer(folder)


def is_answer(renderer: Renderer, index: int) -> list[str]:
    shown = encode(renderer, ENVIRONMENT.demonstrate(index))
    text = "".join(
        TOKENIZER.decode([token]) if trained else "\0"
        for token, trained in zip(shown.token_ids.tolist(), shown.is_answer.tolist(), strict=True)
    )
    return [turn for turn in text.split("\0") if turn]


def test_what_the_assistant_says_is_trained_and_nothing_else(policy_renderer: Renderer) -> None:
    word = ENVIRONMENT.demonstrate(0)
    sum_ = ENVIRONMENT.demonstrate(1)
    expression = sum_.messages[1]["tool_calls"][0]["function"]["arguments"]["expression"]
    assert is_answer(policy_renderer, 0) == [word.messages[1]["content"] + "<|im_end|>"]
    assert is_answer(policy_renderer, 1) == [
        f"<tool_call>calc {expression}</tool_call><|im_end|>",
        sum_.messages[3]["content"] + "<|im_end|>",
    ]


def test_a_demonstration_has_the_ids_of_its_whole_rendering(policy_renderer: Renderer) -> None:
    for index in range(4):
        demonstration = ENVIRONMENT.demonstrate(index)
        whole = TOKENIZER.apply_chat_template(
            demonstration.messages, tools=demonstration.tools, tokenize=False
        )
        ids = TOKENIZER.encode(whole.removesuffix("\n"), add_special_tokens=False)
        assert encode(policy_renderer, demonstration).token_ids.tolist() == ids


def test_the_policy_comes_to_expect_the_demonstrations(tmp_path: Path) -> None:
    make_policy(str(tmp_path), PolicyConfig(hidden_size=64, num_layers=2), seed=0)
    renderer = open_renderer(str(tmp_path))
    rows = [row_of(encode(renderer, ENVIRONMENT.demonstrate(index))) for index in range(1000, 1032)]
    (microbatch,) = pack(rows, Packing(1 << 20))

    def loss() -> float:
        with torch.no_grad():
            logits = Network(str(tmp_path)).logits(microbatch)
            return torch.nn.functional.cross_entropy(logits, microbatch.targets).item()

    before = loss()
    warm = {"steps": 20, "batch_size": 16}
    warmstart(str(tmp_path), RunConfig.model_validate({"policy": {"warmstart": warm}}))
    assert loss() < before - 1.0
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == len(TOKENIZER)


def test_the_learning_rate_rises_then_falls_to_a_tenth() -> None:
    rates = [learning_rate(WarmstartConfig(learning_rate=1.0), 100, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.2) and max(rates) == 1.0
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_a_multimodal_policy_comes_to_expect_what_is_shown(tmp_path: Path) -> None:
    """Its tower is trained too, and where to click depends on the image alone."""
    policy = {"sees": True, "hidden_size": 64, "num_layers": 2}
    make_policy(str(tmp_path), PolicyConfig(**policy), seed=0)
    before = load_file(tmp_path / "model.safetensors")
    warm = {"steps": 10, "batch_size": 8, "label_smoothing": 0}
    config = {"policy": policy | {"warmstart": warm}, "environment": {"name": "screen"}}
    shown = [encode(open_renderer(str(tmp_path)), ScreenOfButtons().demonstrate(1000))]

    def loss() -> float:
        with torch.no_grad():
            ((logits, targets),) = MultimodalLearner(str(tmp_path)).predict(shown)
            return torch.nn.functional.cross_entropy(logits, targets).item()

    untrained = loss()
    warmstart(str(tmp_path), RunConfig.model_validate(config))
    assert loss() < untrained - 1.0
    after = load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before if name.endswith("weight"))
