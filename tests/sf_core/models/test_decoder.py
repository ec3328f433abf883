import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from sf_core.models.decoder import Decoder, DecoderSpec, causal_attention, decoder_spec, fuse
from tests.bench import closeness
from tests.bench.engines.model_folders import ModelFolders


def causal_forward(
    params: dict[str, torch.Tensor], spec: DecoderSpec, ids: torch.Tensor
) -> tuple[Decoder, torch.Tensor]:
    """The fused decoder and its final hidden states [B, T, hidden] for ids [B, T]."""
    decoder = fuse(params, spec)
    num_rows, length = ids.shape

    def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return causal_attention(q, k, v, num_rows)

    positions = torch.arange(length, device=ids.device).repeat(num_rows)
    hidden = decoder.run(ids.flatten(), positions, attend)
    return decoder, hidden.unflatten(0, (num_rows, length))


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "llama-yarn"])
def test_forward_equals_transformers(model_folders: ModelFolders, kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folders(kind))
    spec = decoder_spec(model.config, 128)
    assert spec is not None
    ids = torch.randint(0, 60, (3, 50))
    with torch.no_grad():
        decoder, hidden = causal_forward(_params(model), spec, ids)
        closeness.assert_rounded(decoder.head(hidden), model(ids).logits, closeness.FORWARD)


def test_gradients_equal_those_of_transformers_for_every_parameter(model_folders: ModelFolders) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folders("qwen3"))
    spec = decoder_spec(model.config, 128)
    assert spec is not None
    ids = torch.randint(0, 60, (2, 20))
    params = {name: tensor.detach().clone().requires_grad_() for name, tensor in _params(model).items()}
    decoder, hidden = causal_forward(params, spec, ids)
    decoder.head(hidden).log_softmax(-1)[..., 7].mean().backward()
    model(ids).logits.log_softmax(-1)[..., 7].mean().backward()
    closeness.assert_gradients(
        {name: tensor.grad for name, tensor in params.items()},
        {name: parameter.grad for name, parameter in model.named_parameters()},
    )


def test_right_padding_changes_nothing_before_it(model_folders: ModelFolders) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folders("qwen3"))
    spec = decoder_spec(model.config, 128)
    assert spec is not None
    ids = torch.randint(0, 60, (2, 30))
    with torch.no_grad():
        _, short = causal_forward(_params(model), spec, ids[:, :20])
        _, long = causal_forward(_params(model), spec, ids)
    closeness.assert_rounded(long[:, :20], short, closeness.FORWARD)


def test_configs_it_cannot_run_are_left_to_transformers() -> None:
    assert decoder_spec(LlamaConfig(hidden_act="gelu"), 128) is None
    assert decoder_spec(LlamaConfig(mlp_bias=True), 128) is None
    assert decoder_spec(MistralConfig(sliding_window=64), 128) is None
    assert decoder_spec(MistralConfig(sliding_window=128), 128) is not None
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert decoder_spec(LlamaConfig(rope_parameters=dynamic), 128) is None


def _params(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())
