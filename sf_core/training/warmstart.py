"""Warm start of the built-in policy, which has learned nothing before: imitate demonstrations, in one process
and within half a minute. A model of the user's is trained as a run of its own (stages/warmstart.py).
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from sf_core.config import RunConfig, WarmstartConfig
from sf_core.dataplane.chat.renderer import open_renderer
from sf_core.training.demonstrations import RATE_OF_BUILT_IN, EncodedDemonstration, demonstrations, encode
from sf_core.training.packing.rows import SAMPLING, Row
from sf_core.training.packing.trie import Packing, pack
from sf_core.training.torch.network import Network

BETAS = (0.9, 0.95)
MAX_GRAD_NORM = 1.0
TOKENS_PER_MICROBATCH = 8192

LABEL_SMOOTHING = 0.18
"""What the setting means if it is empty."""


def warmstart(folder: str, config: RunConfig) -> None:
    """Train the policy in the folder and save it back. A function of the folder, the settings of policy and
    environment, and the seed."""
    warm = config.policy.warmstart
    steps = config.policy.warm_steps
    assert warm is not None
    smoothing = LABEL_SMOOTHING if warm.label_smoothing is None else warm.label_smoothing
    renderer = open_renderer(folder)
    learner = TextLearner(folder) if renderer.image_processor is None else MultimodalLearner(folder)
    parameters = list(learner.model.parameters())
    optimizer = torch.optim.AdamW(parameters, betas=BETAS, weight_decay=0.0, fused=True)
    for step, batch in enumerate(demonstrations(config, range(steps))):
        encoded = [encode(renderer, demonstration) for demonstration in batch]
        total = sum(int(demonstration.is_answer.sum()) for demonstration in encoded)
        for logits, targets in learner.predict(encoded):
            loss = torch.nn.functional.cross_entropy(
                logits, targets, reduction="sum", label_smoothing=smoothing
            )
            (loss / total).backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(warm, steps, step)
        optimizer.step()
        optimizer.zero_grad()
    learner.model.save_pretrained(folder)


class TextLearner:
    """The built-in policy as trainers compute it."""

    def __init__(self, folder: str) -> None:
        self._network = Network(folder)
        self.model = self._network.model

    def predict(
        self, demonstrations: list[EncodedDemonstration]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Logits of what the assistant says, and its tokens; of a part of what is shown at a time."""
        for microbatch in pack(
            [row_of(demonstration) for demonstration in demonstrations], Packing(TOKENS_PER_MICROBATCH)
        ):
            yield self._network.logits(microbatch), microbatch.targets


class MultimodalLearner:
    """The built-in policy that sees, as transformers computes it: here alone its tower is trained."""

    def __init__(self, folder: str) -> None:
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).eval()
        # never torchvision's, which need not be there
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def predict(
        self, demonstrations: list[EncodedDemonstration]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """As that of `TextLearner`."""
        size = max(
            1, TOKENS_PER_MICROBATCH // max(demonstration.token_ids.size for demonstration in demonstrations)
        )
        for first in range(0, len(demonstrations), size):
            part = demonstrations[first : first + size]
            ids = _pad(demonstration.token_ids for demonstration in part).long()
            is_answer = _pad(demonstration.is_answer for demonstration in part)
            images = [
                Image.open(io.BytesIO(demonstration.files[span.sha256]))
                for demonstration in part
                for span in demonstration.images
            ]
            # they have the size that the policy sees
            seen = self._processor(images, do_resize=False, return_tensors="pt") if images else {}
            logits = self.model(
                input_ids=ids,
                attention_mask=_pad(
                    np.ones(demonstration.token_ids.size, np.int64) for demonstration in part
                ),
                mm_token_type_ids=(ids == self.model.config.image_token_id).int(),
                use_cache=False,
                **seen,
            ).logits
            is_answer = is_answer[:, 1:]
            yield logits[:, :-1][is_answer], ids[:, 1:][is_answer]


def _pad(arrays: Iterable[np.ndarray]) -> torch.Tensor:
    return pad_sequence([torch.from_numpy(array) for array in arrays], batch_first=True)


def learning_rate(config: WarmstartConfig, steps: int, step: int) -> float:
    """Rate that rises over a twentieth of the steps, then falls to a tenth of its peak along a cosine."""
    peak = config.learning_rate or RATE_OF_BUILT_IN
    rise = max(1, steps // 20)
    if step < rise:
        return peak * (step + 1) / rise
    progress = (step - rise) / max(1, steps - rise)
    return peak * (0.55 + 0.45 * math.cos(math.pi * progress))


def row_of(demonstration: EncodedDemonstration) -> Row:
    """A training row of which only tokens and mask count."""
    nothing = np.zeros(demonstration.token_ids.size, dtype=np.float32)
    return Row(
        token_ids=demonstration.token_ids,
        loss_mask=demonstration.is_answer,
        logprobs=nothing,
        advantages=nothing,
        policy_versions=np.zeros(demonstration.token_ids.size, dtype=np.int32),
        sampling=np.zeros(demonstration.token_ids.size, SAMPLING),
        weights=np.ones(demonstration.token_ids.size, dtype=np.float32),
        group="",
        session="",
    )
