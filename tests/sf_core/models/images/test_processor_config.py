"""What is read of a policy's files, and sizes that neither vLLM nor the trainer changes again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from sf_core.models.images.processor_config import (
    PREPROCESSOR_CONFIG,
    ImageProcessorConfig,
    read_image_processor,
)

IMAGE_PROCESSOR = ImageProcessorConfig(
    token_id=5, token_side=28, min_pixels=4 * 28 * 28, max_pixels=64 * 28 * 28
)
sides = st.integers(1, 2000)


@given(sides, sides, st.integers(4, 200) | st.none())
def test_fit_is_qwens_and_is_left_alone(height: int, width: int, max_tokens: int | None) -> None:
    image_processor = IMAGE_PROCESSOR.with_max_tokens(max_tokens)
    try:
        preprocessed = image_processor.smart_resize(height, width)
    except ValueError as error:
        assert str(error).startswith(f"the image has {width} by {height} pixels")
        return
    limits = image_processor.token_side, image_processor.min_pixels, image_processor.max_pixels
    assert preprocessed == smart_resize(height, width, *limits)
    # the processor of an engine has the limits of the folder, and meets the image at this size
    assert (
        smart_resize(
            *preprocessed, IMAGE_PROCESSOR.token_side, IMAGE_PROCESSOR.min_pixels, IMAGE_PROCESSOR.max_pixels
        )
        == preprocessed
    )
    assert image_processor.count_tokens(*preprocessed) <= (max_tokens or 64)


def test_limit_below_the_processors_least_is_refused() -> None:
    """An engine would make the image larger again."""
    with pytest.raises(
        ValueError, match=r"max_picture_tokens is 3, but the policy.s processor uses at least"
    ):
        IMAGE_PROCESSOR.with_max_tokens(3)


def write_folder(folder: Path, config: dict[str, object], processor: str | None) -> str:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if processor is not None:
        (folder / PREPROCESSOR_CONFIG).write_text(processor, encoding="utf-8")
    return str(folder)


QWEN = {"model_type": "qwen2_5_vl", "image_token_id": 7}


def test_an_image_processor_is_read_from_both_spellings(tmp_path: Path) -> None:
    plain = {"patch_size": 14, "merge_size": 2}
    spelled = (
        {"min_pixels": 3136, "max_pixels": 12845056},
        {"size": {"shortest_edge": 3136, "longest_edge": 12845056}},
    )
    for size in spelled:
        folder = write_folder(tmp_path, QWEN, json.dumps(plain | size))
        assert read_image_processor(folder) == ImageProcessorConfig(7, 28, 3136, 12845056)


def test_a_text_policy_has_no_image_processor(tmp_path: Path) -> None:
    assert read_image_processor(write_folder(tmp_path, {"model_type": "qwen3"}, None)) is None


@pytest.mark.parametrize(
    ("config", "processor", "told"),
    [
        (QWEN, None, "no preprocessor_config.json; save the image processor there too"),
        (QWEN, "{", "preprocessor_config.json is broken"),
        ({"model_type": "qwen2_5_vl"}, "{}", "KeyError('image_token_id')"),
    ],
)
def test_broken_folder_is_refused(
    tmp_path: Path, config: dict[str, object], processor: str | None, told: str
) -> None:
    with pytest.raises(ValueError, match=r"^/\S+: ") as refusal:
        read_image_processor(write_folder(tmp_path, config, processor))
    assert told in str(refusal.value)
