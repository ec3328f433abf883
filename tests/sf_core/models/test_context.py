from typing import Any

import pytest

from sf_core.models.context import count_ids, longest_context


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({}, None),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        # these rotate earlier tokens otherwise once a sequence has grown
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, 4096),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_parameters": {"rope_type": "longrope"},
            },
            4096,
        ),
        (
            {
                "max_position_embeddings": 8192,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            8192,
        ),
    ],
)
def test_the_longest_sequence_is_read_from_the_configuration(
    config: dict[str, Any], longest: int | None
) -> None:
    assert longest_context(config) == longest


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({}, None),
        ({"vocab_size": 7}, 7),
        ({"text_config": {"vocab_size": 9}}, 9),
        ({"text_config": {}}, None),
    ],
)
def test_ids_are_those_of_the_last_layer(config: dict[str, Any], count: int | None) -> None:
    assert count_ids(config) == count
