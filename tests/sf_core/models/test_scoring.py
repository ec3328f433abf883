import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sf_core.models import scoring
from sf_core.models.scoring import Split, Target, score
from tests.bench.closeness import assert_rounded
from tests.bench.memory import peak_bytes
from tests.bench.waits import patience

VOCABULARY = 40
WIDTH = 16
Settings = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64]]


def drawn(temperature: list[float], top_p: list[float], top_k: list[int], num_tokens: int) -> Settings:
    """Settings that repeat, token after token."""
    columns = (np.array(temperature, np.float32), np.array(top_p, np.float32), np.array(top_k))
    return tuple(np.resize(column, num_tokens) for column in columns)  # type: ignore[return-value]


def by_the_definition(
    logits: torch.Tensor, token_ids: torch.Tensor, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token, in double precision, with the gradient of autograd."""
    logprobs = []
    entropies = []
    for row, token, temperature, top_p, top_k in zip(logits.double(), token_ids, *settings, strict=True):
        whole = (row / (float(temperature) or 1.0)).log_softmax(0)
        best = whole.detach().argsort(descending=True)
        kept = len(best)
        if temperature:
            kept = min(int(top_k) or kept, kept)
            probs = whole[best[:kept]].softmax(0).detach()
            kept = max(1, int((probs.cumsum(0) - probs < float(top_p)).sum()))
        kept = max(kept, 1 + int((best == token).nonzero()))
        logprobs.append(whole[token] - whole[best[:kept]].logsumexp(0))
        entropies.append(-(whole.exp() * whole).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def size_of(settings: Settings, *logits: torch.Tensor) -> float:
    """The largest of these logits over the smallest temperature."""
    temperature = settings[0]
    return max(float(one.detach().abs().max()) for one in logits) / float(
        temperature[temperature > 0].min(initial=1)
    )


def example(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a head, tokens, and the gradient of a loss by their log-probs."""
    random = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, WIDTH, generator=random).requires_grad_()
    head = torch.randn(VOCABULARY, WIDTH, generator=random).mul_(0.5).requires_grad_()
    token_ids = torch.randint(VOCABULARY, (num_tokens,), generator=random)
    return hidden, head, token_ids, torch.randn(num_tokens, generator=random)


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [
        ([1.0], [1.0], [0]),
        ([0.6], [1.0], [0]),
        ([1.3], [0.7], [0]),
        ([1.0], [0.9], [5]),
        ([0.0], [0.5], [2]),
        ([1.0, 1.0, 0.0, 2.0, 0.7], [1.0, 1.0, 0.5, 0.9, 1.0], [0, 0, 2, 0, 7]),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 6, 7, 8, 20])
@pytest.mark.parametrize("has_head", [True, False])
def test_scores_and_gradients_are_those_of_the_definition_wherever_chunks_end(
    temperature: list[float],
    top_p: list[float],
    top_k: list[int],
    num_tokens: int,
    has_head: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scoring, "CHUNK_BYTES", 7 * 4 * VOCABULARY)
    settings = drawn(temperature, top_p, top_k, num_tokens)
    hidden, head, token_ids, gradient = example(num_tokens)
    logits = hidden @ head.t()
    predicted = (hidden, head) if has_head else (logits, None)
    found = score(predicted[0], predicted[1], token_ids, *settings)
    expected = by_the_definition(logits, token_ids, settings)
    size = size_of(settings, logits)
    for one, other in zip(found, expected, strict=True):
        assert_rounded(one, other, 8, scale=size)
    inputs = (hidden, head)
    # a loss of the log-probs, of the entropies, and of both
    for which in ([0], [1], [0, 1]):
        slopes = [[gradient, -0.7 * gradient.flip(0)][i] for i in which]
        gradients = torch.autograd.grad([found[i] for i in which], inputs, slopes, retain_graph=True)
        doubles = [slope.double() for slope in slopes]
        wanted = torch.autograd.grad([expected[i] for i in which], inputs, doubles, retain_graph=True)
        for one, other in zip(gradients, wanted, strict=True):
            assert_rounded(one, other, 24)


def predicted(num_tokens: int, rows: int = VOCABULARY) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and the head of a teacher of another width."""
    random = torch.Generator().manual_seed(rows)
    return torch.randn(num_tokens, 9, generator=random), torch.randn(rows, 9, generator=random)


def divergences_by_the_definition(
    logits: torch.Tensor, theirs: torch.Tensor, divergence: str, temperature: npt.NDArray[np.float32]
) -> torch.Tensor:
    """Over the whole vocabulary, in double precision, with the gradient of autograd."""
    scale = torch.from_numpy(np.where(temperature == 0, 1, temperature)).double().unsqueeze(1)
    own, other = ((one.double() / scale).log_softmax(1) for one in (logits, theirs[:, :VOCABULARY]))
    above, below = (own, other) if divergence == "reverse" else (other, own)
    return (above.exp() * (above - below)).sum(1)


@pytest.mark.parametrize("divergence", ["reverse", "forward"])
@pytest.mark.parametrize("rows", [VOCABULARY, VOCABULARY + 5])
@pytest.mark.parametrize("has_head", [True, False])
def test_divergences_and_gradients_are_those_of_the_definition(
    divergence: str, rows: int, has_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Divergences are those of uncut distributions, even where top-k or top-p cuts the log-probs."""
    monkeypatch.setattr(scoring, "CHUNK_BYTES", 7 * 4 * VOCABULARY)
    settings = drawn([1.0, 0.7, 0.0, 1.3], [1.0, 0.9, 1.0, 0.8], [0, 0, 0, 5], 20)
    hidden, head, token_ids, gradient = example(20)
    outputs, their_head = predicted(20, rows)
    theirs = outputs @ their_head.t()
    target = Target(outputs, their_head, divergence) if has_head else Target(theirs, None, divergence)
    found = score(hidden, head, token_ids, *settings, target=target)
    logits = hidden @ head.t()
    exact = by_the_definition(logits, token_ids, settings)
    expected = (*exact, divergences_by_the_definition(logits, theirs, divergence, settings[0]))
    size = size_of(settings, logits, theirs)
    for one, other in zip(found, expected, strict=True):
        assert_rounded(one, other, 8, scale=size)
    for which in ([2], [0, 2], [0, 1, 2]):
        slopes = [(gradient, -0.7 * gradient.flip(0), 0.3 + gradient)[i] for i in which]
        gradients = torch.autograd.grad([found[i] for i in which], (hidden, head), slopes, retain_graph=True)
        doubles = [slope.double() for slope in slopes]
        wanted = torch.autograd.grad([expected[i] for i in which], (hidden, head), doubles, retain_graph=True)
        for one, other in zip(gradients, wanted, strict=True):
            assert_rounded(one, other, 24)


@pytest.mark.parametrize("divergence", ["reverse", "forward"])
def test_from_itself_a_model_diverges_by_nothing_at_all(divergence: str) -> None:
    hidden, head, token_ids, gradient = example(20)
    target = Target(hidden.detach(), head.detach(), divergence)
    *_, divergences = score(hidden, head, token_ids, *drawn([0.7], [0.9], [0], 20), target=target)
    assert not divergences.any()
    for found in torch.autograd.grad(divergences, (hidden, head), gradient):
        assert not found.any()


def test_a_teacher_without_a_logit_for_each_token_of_the_policy_is_refused() -> None:
    hidden, head, token_ids, _ = example(3)
    target = Target(*predicted(3, VOCABULARY - 1), "reverse")
    with pytest.raises(
        ValueError, match="the teacher has 39 logits but needs one for each of the policy's 40"
    ):
        score(hidden, head, token_ids, *drawn([1.0], [1.0], [0], 3), target=target)


def test_a_split_head_gives_every_process_the_same_scores_and_its_part_of_the_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scoring, "CHUNK_BYTES", 7 * 4 * VOCABULARY)
    settings = drawn([1.0, 0.7, 1.3], [1.0, 0.9, 1.0], [0, 0, 5], 20)
    hidden, head, token_ids, gradient = example(20)
    whole = score(hidden, head, token_ids, *settings)
    slopes = (gradient, -0.7 * gradient.flip(0))
    of_hidden, of_head = torch.autograd.grad(whole, (hidden, head), slopes)
    cuts = (slice(0, 24), slice(24, VOCABULARY))
    meet = threading.Barrier(2)
    given = {}

    def process(own: slice) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        def gather(logits: torch.Tensor) -> torch.Tensor:
            given[own.start] = logits
            meet.wait(patience())
            gathered = torch.cat([given[cut.start] for cut in cuts], 1)
            meet.wait(patience())
            return gathered

        part = head.detach()[own].requires_grad_()
        found = score(hidden, part, token_ids, *settings, Split(VOCABULARY, own, gather))
        return found, torch.autograd.grad(found, (hidden, part), slopes)

    with ThreadPoolExecutor(2) as processes:
        (one, of_one), (other, of_other) = processes.map(process, cuts)
    for found in (one, other):
        assert_rounded(torch.stack(found), torch.stack(whole), 8)
    assert_rounded(of_one[0] + of_other[0], of_hidden, 24)
    assert_rounded(torch.cat((of_one[1], of_other[1])), of_head, 24)


def test_no_token_has_no_score_and_gradient_zero() -> None:
    hidden, head, token_ids, _ = example(0)
    logprobs, entropies = score(hidden, head, token_ids, *drawn([1.0], [0.9], [0], 0))
    logprobs.sum().backward()
    assert logprobs.shape == entropies.shape == (0,)
    assert hidden.grad is not None and hidden.grad.shape == hidden.shape
    assert head.grad is not None and not head.grad.any()


def test_a_vocabulary_beyond_a_chunk_is_scored_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, token_ids, _ = example(3)
    settings = drawn([1.0], [1.0], [0], 3)
    expected = score(hidden, head, token_ids, *settings)
    monkeypatch.setattr(scoring, "CHUNK_BYTES", 8)
    for one, other in zip(score(hidden, head, token_ids, *settings), expected, strict=True):
        assert_rounded(one, other, 8)


def test_bfloat16_is_scored_in_float32_and_its_gradient_is_summed_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So many chunks that a sum in bfloat16 would lose those that come late."""
    monkeypatch.setattr(scoring, "CHUNK_BYTES", 4 * VOCABULARY)
    hidden, head, token_ids, _ = example(512)
    hidden, head = (tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, head))
    settings = drawn([0.8], [1.0], [0], 512)
    found = score(hidden, head, token_ids, *settings)
    logits = hidden @ head.t()
    expected = by_the_definition(logits, token_ids, settings)
    for one, other in zip(found, expected, strict=True):
        assert_rounded(one, other, 8, scale=size_of(settings, logits))
    whole_hidden, whole_head = (tensor.detach().float().requires_grad_() for tensor in (hidden, head))
    exact, _ = score(whole_hidden, whole_head, token_ids, *settings)
    exact.sum().backward()
    found[0].sum().backward()
    for tensor, whole in ((hidden, whole_hidden), (head, whole_head)):
        assert tensor.grad is not None and whole.grad is not None and tensor.grad.dtype == torch.bfloat16
        difference = (tensor.grad.float() - whole.grad).norm() / whole.grad.norm()
        assert difference < 0.01


@pytest.mark.parametrize("kept_bytes", [0, 1 << 30])
@pytest.mark.parametrize("is_fast", [False, True])
def test_products_that_stay_for_the_backward_pass_change_nothing(
    kept_bytes: int, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16. `is_fast`: the gradient of the head is made of products in bfloat16 too."""
    monkeypatch.setattr(scoring, "CHUNK_BYTES", 8 * 4 * VOCABULARY)
    monkeypatch.setattr(scoring, "MAX_CACHED_LOGITS_BYTES", kept_bytes)
    monkeypatch.setattr(scoring, "has_fast_products", lambda *_: True)
    hidden, head, token_ids, gradient = example(20)
    narrow = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, head)]
    whole = [tensor.detach().float().requires_grad_() for tensor in narrow]
    settings = drawn([0.8], [0.9], [0], 20)
    (exact, exact_entropies), (found, entropies) = (
        score(*tensors, token_ids, *settings, fast_head=is_fast) for tensors in (whole, narrow)
    )
    torch.autograd.backward((exact, exact_entropies), (gradient, gradient))
    for _ in range(2):
        # the first pass overwrites what stayed, and the second one makes it again
        of_hidden, of_head = torch.autograd.grad(
            (found, entropies), narrow, (gradient, gradient), retain_graph=True
        )
        for ours, tensor in ((of_hidden, whole[0]), (of_head, whole[1])):
            assert tensor.grad is not None and ours.dtype == torch.bfloat16
            assert (ours.float() - tensor.grad).norm() < 0.02 * tensor.grad.norm()


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_entropy_of_equal_logits_is_the_log_of_their_number(temperature: float) -> None:
    _, entropy = score(torch.zeros(1, 8), None, torch.tensor([3]), *drawn([temperature], [1.0], [0], 1))
    assert entropy.item() == pytest.approx(math.log(8))


@pytest.mark.parametrize(("top_p", "has_teacher"), [(1.0, False), (0.9, False), (1.0, True)])
def test_memory_does_not_grow_with_tokens_times_vocabulary(
    top_p: float, has_teacher: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "CHUNK_BYTES", 16 * 4 * 4096)
    head = torch.randn(4096, 4, requires_grad=True)

    def peak(num_tokens: int) -> int:
        hidden = torch.randn(num_tokens, 4, requires_grad=True)
        target = Target(torch.randn(num_tokens, 2), torch.randn(4096, 2), "reverse") if has_teacher else None
        token_ids = torch.zeros(num_tokens, dtype=torch.long)
        settings = drawn([0.9], [top_p], [0], num_tokens)
        return peak_bytes(
            lambda: torch.stack(score(hidden, head, token_ids, *settings, target=target)).sum().backward()
        )

    few = peak(64)
    many = peak(1024)
    assert few > 16 * 4 * 4096, "the chunk is seen"
    assert many - few < 1024 * 100, "tens of bytes for each token"
