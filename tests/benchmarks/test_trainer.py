"""Both sides of the benchmark of trainers train on the same completions."""

import json
from itertools import pairwise
from pathlib import Path

from benchmarks.trainer import GROUP_SIZE, PROMPT_TOKENS, as_table, make_batch
from sf_core.training.packing.rows import read_rows


def test_our_rows_are_the_given_completions_after_the_prompts_of_their_groups(tmp_path: Path) -> None:
    make_batch(str(tmp_path), 1000, PROMPT_TOKENS, range(16, 24), GROUP_SIZE)
    given = json.loads((tmp_path / "batch.json").read_text(encoding="utf-8"))["rows"]
    rows = read_rows(as_table(given, GROUP_SIZE))
    assert [row.token_ids[row.loss_mask].tolist() for row in rows] == [one["completion"] for one in given]
    assert [row.loss_mask.sum() for row in rows] == list(range(16, 24))
    assert all(row.advantages.all() for row in rows)
    prompts = [row.token_ids[:PROMPT_TOKENS].tolist() for row in rows]
    assert [a == b for a, b in pairwise(prompts)] == [True] * 3 + [False] + [True] * 3
