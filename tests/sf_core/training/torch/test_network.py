from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sf_core.models import scoring
from sf_core.training.packing.rows import read_rows
from sf_core.training.packing.trie import Packing, pack
from sf_core.training.torch.network import Network
from tests.bench import closeness, training
from tests.bench.memory import peak_bytes


@pytest.fixture(params=training.policies.POLICIES, ids=lambda make: make.__name__)
def policy_folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    torch.manual_seed(0)
    request.param().save_pretrained(tmp_path)
    return str(tmp_path)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_logits_and_gradients_are_those_of_every_row_by_itself(policy_folder: str) -> None:
    network = Network(policy_folder)
    reference = AutoModelForCausalLM.from_pretrained(policy_folder).eval()
    rows = read_rows(training.batches.make_batch(training.batches.grouped_rows(num_groups=3, group_size=4)))
    for microbatch in pack(rows, Packing(120)):
        logits = network.logits(microbatch)
        torch.nn.functional.cross_entropy(logits, microbatch.targets, reduction="sum").backward()
    for row in rows:
        ids = torch.tensor(row.token_ids).long()
        trained = torch.tensor(row.loss_mask).nonzero().squeeze(1)
        alone = reference(ids.unsqueeze(0)).logits[0, trained - 1]
        torch.nn.functional.cross_entropy(alone, ids[trained], reduction="sum").backward()
    found = gradients(network.model)
    expected = gradients(reference)
    closeness.assert_gradients(found, {name: expected[name] for name in found})


@pytest.mark.parametrize("rows_at_a_time", [1, 5, 1000])
def test_scores_and_their_gradients_are_those_of_the_logits(
    policy_folder: str, rows_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "CHUNK_BYTES", rows_at_a_time * 4 * training.policies.COMMON["vocab_size"])
    batch = training.batches.make_batch(
        training.batches.grouped_rows(num_groups=3, group_size=4), sampling=(0.7, 1.0, 0)
    )
    (microbatch,) = pack(read_rows(batch), Packing(1 << 20))
    network = Network(policy_folder)
    reference = Network(policy_folder)
    logprobs, entropies = network.scores(microbatch)
    everything = (reference.logits(microbatch) / 0.7).log_softmax(-1)
    expected = everything.gather(1, microbatch.targets.unsqueeze(1)).squeeze(1)
    closeness.assert_rounded(logprobs, expected, closeness.FORWARD)
    closeness.assert_rounded(entropies, -(everything.exp() * everything).sum(1), closeness.FORWARD)
    for scores in (logprobs, expected):
        (scores * microbatch.advantages).sum().backward()
    # one network, of which only the head is computed otherwise
    closeness.assert_gradients(gradients(network.model), gradients(reference.model), closeness.FORWARD)


@pytest.mark.parametrize(
    "make", [training.policies.qwen, training.policies.gpt2], ids=["lean", "transformers"]
)
def test_tokens_times_vocabulary_are_never_held(
    make: Callable[..., torch.nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = 32768
    make(vocab_size=vocabulary).save_pretrained(tmp_path)
    network = Network(str(tmp_path))
    (microbatch,) = pack(
        read_rows(training.batches.make_batch(training.batches.grouped_rows(num_groups=32, group_size=8))),
        Packing(1 << 20),
    )
    monkeypatch.setattr(scoring, "CHUNK_BYTES", 4 << 20)
    logits = 4 * vocabulary * len(microbatch.targets)
    assert peak_bytes(lambda: network.scores(microbatch)[0].sum().backward()) < logits / 2
