"""Scores given tokens under the distributions that `sampling.sample` draws from, with gradients.

Logits of many tokens over a large vocabulary would take most of a trainer's memory. So they exist for some
tokens at a time, and the backward pass makes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.function import once_differentiable

from sf_core.models.images.processor_config import PLACEHOLDER_LOGIT_BIAS
from sf_core.models.projections import has_fast_products
from sf_core.models.sampling import cutoff

CHUNK_BYTES = 64 << 20
"""Memory of the float32 logits that exist at a time, beside a copy. With less, the gradient of the whole head
is read and written too often."""


MAX_CACHED_LOGITS_BYTES = 2 * CHUNK_BYTES
"""Most memory of products with a narrower head that stay for the backward pass."""


@dataclass(frozen=True, slots=True)
class Split:
    """A head of which each of several processes has some rows; all of them score the same outputs at once."""

    vocabulary: int
    own: slice
    """The rows of this process."""
    gather: Callable[[torch.Tensor], torch.Tensor]
    """Logits [N, own rows] of each process -> logits [N, vocabulary] on all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """What a teacher predicts at the places of N tokens, and which divergence from it is measured. It has a
    logit for each token of the policy's vocabulary; those beyond are left out of its distribution."""

    outputs: torch.Tensor
    """[N, width of the teacher]"""
    head: torch.Tensor | None
    """[rows, width of the teacher]; None if the outputs are the logits."""
    divergence: str
    """reverse: KL(policy || teacher). forward: KL(teacher || policy)."""


def score(
    outputs: torch.Tensor,
    head: torch.Tensor | None,
    token_ids: torch.Tensor,
    temperature: npt.NDArray[np.float32],
    top_p: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int64],
    split: Split | None = None,
    target: Target | None = None,
    never: int | None = None,
    fast_head: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Log-probs [N] of token_ids [N], and the entropies [N] in nats of the distributions before top-k and
    top-p cut them; with a target also the divergences [N] in nats of these from the teacher's, over the same
    temperature. All of them are differentiable, in float32.

    The logits are `outputs` [N, width] times the weight `head` [V, width]; without a head, `outputs` are the
    logits. A token outside the support, as other weights may have sampled it, widens the support down to
    itself, so that its log-prob stays finite and has a gradient. Of a split head, the gradient of the outputs
    is this process's part of a sum. `never`: an id that policy and target never sample, as its logit is
    raised by PLACEHOLDER_BIAS, as engines do. `fast_head`: the products of the head's gradient are in the
    dtype of the head where a CPU is faster in it, as those of all other weights are, and not in float32.
    """
    greedy = temperature == 0
    top_p = np.where(greedy, 1, top_p)
    top_k = np.where(greedy, 0, top_k)
    scale = torch.from_numpy(np.where(greedy, 1, temperature)).to(outputs.device, torch.float32)
    vocabulary = outputs.shape[1] if head is None else head.shape[0]
    theirs = (None, None, "") if target is None else _narrow(target, vocabulary)
    settings = scale, top_p, top_k, split, never, fast_head
    return tuple(_Score.apply(outputs, head, token_ids, *settings, *theirs))


def _narrow(target: Target, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor | None, str]:
    """Outputs and head of the target that make logits of this vocabulary alone, and its divergence."""
    outputs = target.outputs
    head = target.head
    if (rows := outputs.shape[1] if head is None else head.shape[0]) < vocabulary:
        raise ValueError(
            f"the teacher has {rows} logits but needs one for each of the policy's {vocabulary} token ids"
        )
    if head is None:
        return outputs[:, :vocabulary], None, target.divergence
    return outputs, head[:vocabulary], target.divergence


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        outputs: torch.Tensor,
        head: torch.Tensor | None,
        token_ids: torch.Tensor,
        scale: torch.Tensor,
        top_p: npt.NDArray[np.float32],
        top_k: npt.NDArray[np.int64],
        split: Split | None,
        never: int | None,
        fast_head: bool,
        teacher_outputs: torch.Tensor | None,
        teacher_head: torch.Tensor | None,
        divergence: str,
    ) -> tuple[torch.Tensor, ...]:
        logprobs = torch.empty_like(scale)
        entropies = torch.empty_like(scale)
        divergences = None if teacher_outputs is None else torch.empty_like(scale)
        # what the backward pass needs beside the logits: which of them count, and their log-sum-exp
        lowest = torch.full_like(scale, -torch.inf)
        normalizers = torch.empty_like(scale)
        is_truncated = (top_p < 1) | (top_k > 0)
        buffer_for_logprobs: torch.Tensor | None = None
        teacher = _teacher_chunks(teacher_outputs, teacher_head, scale, never)
        is_narrow = head is not None and head.dtype != torch.float32
        cached_logits: torch.Tensor | None = None
        if head is not None and is_narrow and split is None and any(ctx.needs_input_grad):
            cached_logits = _allocate_logits(outputs, head)
        chunks = _chunks(outputs, head, scale, split, never, to=cached_logits)
        for (part, logits), teacher_logprobs in zip(chunks, teacher, strict=False):
            chosen = logits.gather(1, token_ids[part].unsqueeze(1))
            buffer_for_logprobs = (
                torch.empty_like(logits) if buffer_for_logprobs is None else buffer_for_logprobs
            )
            all_logprobs = torch.log_softmax(logits, 1, out=buffer_for_logprobs[: len(logits)])
            normalizer = chosen - all_logprobs.gather(1, token_ids[part].unsqueeze(1))
            if is_truncated[part].any():
                lowest_logit = torch.minimum(cutoff(logits, top_p[part], top_k[part]), chosen)
                lowest[part] = lowest_logit.squeeze(1)
                normalizer = logits.masked_fill(logits < lowest_logit, -torch.inf).logsumexp(1, keepdim=True)
            logprobs[part] = (chosen - normalizer).squeeze(1)
            normalizers[part] = normalizer.squeeze(1)
            if divergences is not None:
                divergences[part] = _divergence(all_logprobs, teacher_logprobs, divergence, logits)
            entropies[part] = -torch.exp(all_logprobs, out=logits).mul_(all_logprobs).sum(1)
        made = lowest, normalizers, divergences
        ctx.save_for_backward(outputs, head, token_ids, scale, *made, teacher_outputs, teacher_head)
        ctx.set_materialize_grads(False)
        ctx.split = split
        ctx.never = never
        ctx.divergence = divergence
        ctx.cached_logits = cached_logits
        ctx.fast_head = fast_head and is_narrow and has_fast_products(outputs.dtype, outputs.device)
        return (logprobs, entropies) if divergences is None else (logprobs, entropies, divergences)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        gradient: torch.Tensor | None,
        entropies_gradient: torch.Tensor | None,
        divergences_gradient: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        outputs, head, token_ids, scale, lowest, normalizers, divergences, *teacher_tensors = (
            ctx.saved_tensors
        )
        is_truncated = lowest > -torch.inf
        gradient = torch.zeros_like(scale) if gradient is None else gradient
        # with a gradient of the others too each part has its own factor
        is_alone = entropies_gradient is None and divergences_gradient is None
        slope = ((gradient if is_alone else 1.0) / scale).unsqueeze(1)
        outputs_gradient = torch.empty_like(outputs)
        # summed in float32, because there are many chunks; a frozen head has none
        is_learned = head is not None and ctx.needs_input_grad[1]
        # they are overwritten: a second backward pass makes others
        cached_logits = ctx.cached_logits
        ctx.cached_logits = None
        is_one_product = is_learned and ctx.fast_head and cached_logits is not None
        head_gradient_sum = (
            torch.zeros_like(head, dtype=torch.float32) if is_learned and not is_one_product else None
        )
        teacher_outputs, teacher_head = teacher_tensors if divergences_gradient is not None else (None, None)
        teacher = _teacher_chunks(teacher_outputs, teacher_head, scale, ctx.never)
        chunks = _chunks(outputs, head, scale, ctx.split, ctx.never, made=cached_logits)
        for (part, logits), target in zip(chunks, teacher, strict=False):
            extra_gradient: torch.Tensor | None = None
            if entropies_gradient is not None:
                extra_gradient = _negative_entropy_gradient(logits).mul_(
                    entropies_gradient[part].unsqueeze(1)
                )
            if divergences_gradient is not None:
                teacher_gradient = _divergence_gradient(logits, target, ctx.divergence, divergences[part])
                teacher_gradient.mul_(divergences_gradient[part].unsqueeze(1))
                extra_gradient = (
                    teacher_gradient if extra_gradient is None else extra_gradient.add_(teacher_gradient)
                )
            if is_truncated[part].any():
                logits.masked_fill_(logits < lowest[part].unsqueeze(1), -torch.inf)
            # of minus the log-prob, by its logits: the probabilities, less one at the token
            nll_gradient = logits.sub_(normalizers[part].unsqueeze(1)).exp_()
            nll_gradient.scatter_add_(
                1, token_ids[part].unsqueeze(1), nll_gradient.new_full((len(nll_gradient), 1), -1.0)
            )
            if extra_gradient is not None:
                nll_gradient.mul_(gradient[part].unsqueeze(1)).add_(extra_gradient)
            if ctx.split is not None:
                nll_gradient = nll_gradient[:, ctx.split.own]
            if head is None:
                outputs_gradient[part] = nll_gradient.mul_(-slope[part])
                continue
            narrow_gradient = (
                nll_gradient.to(head.dtype)
                if cached_logits is None
                else cached_logits[part].copy_(nll_gradient)
            )
            outputs_gradient[part] = (narrow_gradient @ head).mul_(-slope[part])
            if head_gradient_sum is None:
                continue
            scaled_outputs = outputs[part].float() * -slope[part]
            if ctx.fast_head:
                head_gradient_sum.add_(narrow_gradient.t() @ scaled_outputs.to(head.dtype))
            else:
                head_gradient_sum.addmm_(nll_gradient.t(), scaled_outputs)
        if is_one_product:
            head_gradient = cached_logits.t() @ (outputs.float() * -slope).to(head.dtype)
        else:
            head_gradient = None if head_gradient_sum is None else head_gradient_sum.to(head.dtype)
        return outputs_gradient, head_gradient, *[None] * 10


def _allocate_logits(outputs: torch.Tensor, head: torch.Tensor) -> torch.Tensor | None:
    """For those of all outputs [N, vocabulary], which a backward pass would make again; None if they are
    large."""
    num_bytes = len(outputs) * head.shape[0] * outputs.element_size()
    return outputs.new_empty((len(outputs), head.shape[0])) if num_bytes <= MAX_CACHED_LOGITS_BYTES else None


def _negative_entropy_gradient(logits: torch.Tensor) -> torch.Tensor:
    """The gradient of minus the entropy of each row, by its logits."""
    logprobs = torch.log_softmax(logits, 1)
    probabilities = logprobs.exp()
    entropies = -(probabilities * logprobs).sum(1, keepdim=True)
    return probabilities.mul_(logprobs.add_(entropies))


def _divergence(
    logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, divergence: str, buffer_for_logprobs: torch.Tensor
) -> torch.Tensor:
    """[n] divergence of rows of log-probs [n, vocabulary], 0 where they are the teacher's; takes the memory
    of the teacher's and of `spare`."""
    if divergence == "reverse":
        return (
            teacher_logprobs.neg_().add_(logprobs).mul_(torch.exp(logprobs, out=buffer_for_logprobs)).sum(1)
        )
    torch.exp(teacher_logprobs, out=buffer_for_logprobs)
    return teacher_logprobs.sub_(logprobs).mul_(buffer_for_logprobs).sum(1)


def _divergence_gradient(
    logits: torch.Tensor, teacher_logprobs: torch.Tensor, divergence: str, divergences: torch.Tensor
) -> torch.Tensor:
    """The gradient of minus the divergence of each row, by its logits; takes the memory of the teacher's."""
    logprobs = torch.log_softmax(logits, 1)
    if divergence == "forward":
        return teacher_logprobs.exp_().sub_(logprobs.exp_())
    gaps = teacher_logprobs.sub_(logprobs)
    return gaps.add_(divergences.unsqueeze(1)).mul_(logprobs.exp_())


def _teacher_chunks(
    outputs: torch.Tensor | None, head: torch.Tensor | None, scale: torch.Tensor, never: int | None
) -> Iterator[Any]:
    """Log-probs of all tokens by a teacher, for the tokens of one chunk of the policy's after the other; None
    for each without a teacher."""
    if outputs is None:
        yield from repeat(None)
        return
    buffer_for_logprobs: torch.Tensor | None = None
    for _, logits in _chunks(outputs, head, scale, None, never):
        buffer_for_logprobs = torch.empty_like(logits) if buffer_for_logprobs is None else buffer_for_logprobs
        yield torch.log_softmax(logits, 1, out=buffer_for_logprobs[: len(logits)])


def _chunks(
    outputs: torch.Tensor,
    head: torch.Tensor | None,
    scale: torch.Tensor,
    split: Split | None,
    never: int | None,
    *,
    to: torch.Tensor | None = None,
    made: torch.Tensor | None = None,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Logits over temperature, in float32, for some tokens at a time. All are given in the same memory, since
    taking 64 MiB from the system and returning it costs half as much as computing them. `to`: takes the
    products [N, vocabulary] with a narrower head. `made`: has them from an earlier pass."""
    vocabulary = outputs.shape[1] if head is None else split.vocabulary if split else head.shape[0]
    rows = max(1, CHUNK_BYTES // (4 * vocabulary))
    buffer = scale.new_empty((min(rows, len(outputs)), vocabulary))
    scaled = bool((scale != 1).any())
    for start in range(0, len(outputs), rows):
        part = slice(start, start + rows)
        logits = buffer[: len(outputs[part])]
        if head is None:
            logits.copy_(outputs[part])
        elif split is not None:
            logits.copy_(split.gather(outputs[part] @ head.t()))
        elif head.dtype == logits.dtype:
            torch.mm(outputs[part], head.t(), out=logits)
        elif made is not None:
            logits.copy_(made[part])
        else:
            room = None if to is None else to[part]
            logits.copy_(torch.mm(outputs[part], head.t(), out=room))
        if never is not None:
            logits[:, never] += PLACEHOLDER_LOGIT_BIAS
        yield part, logits.div_(scale[part].unsqueeze(1)) if scaled else logits
