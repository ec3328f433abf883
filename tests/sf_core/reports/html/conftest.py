from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sf_core.config import RunConfig
from storage.run_directory import RunDirectory
from storage.tables.schema import TurnSpan
from tests.bench.reports.report_runs import HOSTILE, commit_iteration, goes_on, talk


@pytest.fixture
def byte_tokenizer(tmp_path: Path) -> PreTrainedTokenizerFast:
    characters = bytes_to_unicode()
    backend = Tokenizer(models.BPE({characters[byte]: byte for byte in range(256)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


@pytest.fixture
def talking_run(tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast) -> RunDirectory:
    run = RunDirectory(str(tmp_path / "run-1"))
    run.write_config(RunConfig(run_id="run-1"))
    byte_tokenizer.save_pretrained(run.start_dir)
    first = talk("run-1.g1.0.a1", "name a fruit", "apple pie", [0, 1], interruptions=1)
    commit_iteration(run, 0, [talk("run-1.g0.0.a1", "hello", "Grüße", [0], reward=0.25)])
    commit_iteration(run, 1, [first, goes_on(first, len(first.token_ids), "another", "pear", 1)])
    return run


@pytest.fixture
def hostile_run(talking_run: RunDirectory) -> RunDirectory:
    row = talk(
        f"run-1.{HOSTILE}",
        HOSTILE,
        HOSTILE,
        [2],
        task_id=HOSTILE,
        environment=HOSTILE,
        group_id=HOSTILE,
        reward_parts={HOSTILE: 1.0},
        status=HOSTILE,
        output=HOSTILE,
    )
    turns = [TurnSpan(HOSTILE, t.start, t.end, t.finish_reason and HOSTILE, HOSTILE) for t in row.turns]
    commit_iteration(talking_run, 2, [replace(row, turns=turns)])
    return talking_run
