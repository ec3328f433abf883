"""Batches of conversations with images, and what transformers makes of them row by row."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from sf_core.config import PolicyConfig
from sf_core.models.builtin import make_policy
from sf_core.models.images.processor_config import ImageProcessorConfig, read_image_processor
from sf_core.types import ImageSpan
from storage.media import read_image, store_image
from storage.tables.schema import IMAGES
from storage.tables.trajectories import images_of
from tests.bench.training.batches import make_batch

SIZES = ((56, 56), (28, 112), (84, 56), (112, 84))
"""Heights and widths of images, as the policy sees them."""

Part = int | str
"""A part of a prompt: a number of random tokens, or the name of an image."""


def multimodal_policy(folder: str) -> str:
    """A built-in policy that sees, with weights that matter: else all log-probs are nearly equal."""
    make_policy(folder, PolicyConfig(hidden_size=64, num_layers=2, sees=True), seed=1)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)
    model.save_pretrained(folder)
    return folder


def store_named(media: str, name: str) -> tuple[str, int, int]:
    """The sha256, height and width of the image of this name, which is a number."""
    height, width = SIZES[int(name) % len(SIZES)]
    pixels = np.random.default_rng(int(name)).integers(256, size=(height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return store_image(media, file.getvalue()), height, width


def multimodal_batch(
    folder: str, media: str, rows: Sequence[Sequence[tuple[Sequence[Part], int]]], **choices: Any
) -> pa.Table:
    """Each row is several turns: the parts of a prompt, and the number of tokens that were sampled after it.
    Equal prompts have equal tokens."""
    image_processor = read_image_processor(folder)
    assert image_processor is not None
    made = [_row(image_processor, media, turns, number) for number, turns in enumerate(rows)]
    batch = make_batch([(ids, mask) for ids, mask, _ in made], logprob=-4.0, **choices)
    images = [
        [{name: getattr(span, name) for name in ImageSpan.__struct_fields__} for span in spans]
        for _, _, spans in made
    ]
    return batch.append_column(IMAGES, pa.array(images, IMAGES.type))


def _row(
    image_processor: ImageProcessorConfig,
    media: str,
    turns: Sequence[tuple[Sequence[Part], int]],
    number: int,
) -> tuple[list[int], list[bool], list[ImageSpan]]:
    ids: list[int] = []
    mask: list[bool] = []
    spans = []
    sampled = np.random.default_rng((7, number))
    for parts, length in turns:
        for part in parts:
            if isinstance(part, int):
                ids += np.random.default_rng((3, len(ids))).integers(10, 60, size=part).tolist()
                continue
            sha256, height, width = store_named(media, part)
            spans.append(
                ImageSpan(sha256, len(ids), image_processor.count_tokens(height, width), height, width)
            )
            ids += [image_processor.token_id] * spans[-1].length
        mask += [False] * (len(ids) - len(mask)) + [True] * length
        ids += sampled.integers(10, 60, size=length).tolist()
    return ids, mask, spans


def seen_by_transformers(model: Any, folder: str, media: str, batch: pa.Table) -> list[torch.Tensor]:
    """Log-probs of each row's trained tokens, with their gradients, by transformers' own forward pass. The
    placeholder is never sampled."""
    found = []
    for scores, row in zip(predict(model, folder, media, batch), batch.to_pylist(), strict=True):
        ids = torch.tensor(row["token_ids"])[torch.tensor(row["loss_mask"])]
        found.append(scores.gather(1, ids.unsqueeze(1)).squeeze(1))
    return found


def predict(model: Any, folder: str, media: str, batch: pa.Table) -> list[torch.Tensor]:
    """The same of every id of the vocabulary in their places."""
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    placeholder = model.config.image_token_id
    inner = model.model
    found = []
    for row, spans in zip(batch.to_pylist(), images_of(batch), strict=True):
        ids = torch.tensor([row["token_ids"]])
        x = inner.get_input_embeddings()(ids)
        seen = {}
        if spans:
            files = [Image.open(io.BytesIO(read_image(media, span.sha256))) for span in spans]
            read = processor(files, return_tensors="pt")
            assert read["image_grid_thw"][:, 1:].tolist() == [[s.height // 14, s.width // 14] for s in spans]
            with torch.no_grad():
                features = torch.cat(
                    list(inner.get_image_features(read["pixel_values"], read["image_grid_thw"]).pooler_output)
                )
            x = x.masked_scatter((ids == placeholder).unsqueeze(-1).expand_as(x), features)
            seen = {"image_grid_thw": read["image_grid_thw"]}
        places, _ = inner.get_rope_index(ids, mm_token_type_ids=(ids == placeholder).int(), **seen)
        hidden = inner.language_model(inputs_embeds=x, position_ids=places, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)[0]
        logits = logits - 100 * torch.nn.functional.one_hot(torch.tensor(placeholder), logits.shape[1])
        (trained,) = np.nonzero(row["loss_mask"])
        found.append(logits[trained - 1].log_softmax(-1))
    return found


def loaded(folder: str | Path) -> Any:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
