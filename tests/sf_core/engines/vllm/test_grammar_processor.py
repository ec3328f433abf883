"""The grammar processor with vLLM's second model runner, which needs a GPU: here its interface alone, in
vLLM's environment. With the first runner it is in the contract."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import sf_core
from tests.bench.engines import model_folders
from tests.bench.waits import patience

pytestmark = pytest.mark.system

SCRIPT = """
import sys
from types import SimpleNamespace

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState
from sf_core.engines.vllm.grammar_processor import GrammarProcessor

folder, stop, zero, num_ids = sys.argv[1], *map(int, sys.argv[2:])
one = zero + 1
tokens, prompt_len = torch.zeros(4, 32, dtype=torch.int32), np.zeros(4, np.int32)
states = LogitsProcRequestState(
    device=torch.device("cpu"), max_num_reqs=4, vocab_size=num_ids, all_token_ids=SimpleNamespace(gpu=tokens),
    prompt_len=SimpleNamespace(np=prompt_len), prefill_len=None, total_len=None,
)
processor = GrammarProcessor(SimpleNamespace(model_config=SimpleNamespace(model=folder)), states)
assert issubclass(GrammarProcessor, LogitsProcessor)


def begin(slot, prompt, grammar, num_sampled=0):
    tokens[slot, : len(prompt)] = torch.tensor(prompt)
    prompt_len[slot] = len(prompt)
    extra = {"grammar": grammar, "num_sampled": num_sampled} if grammar else None
    return processor.add_request(slot, SamplingParams(stop_token_ids=[stop], extra_args=extra))


def allowed(**lengths):
    "What each of these slots may sample next, whose sequences are so long; rows are in this order."
    slots = [int(name[1:]) for name in lengths]
    ctx = LogitsContext(
        expanded_idx_mapping=torch.tensor(slots), idx_mapping=torch.tensor(slots),
        idx_mapping_np=np.array(slots), expanded_local_pos=None, input_ids=None, seq_lens_upper_bound_np=None,
        pos=torch.tensor([*lengths.values()]) - 1,
    )
    logits = processor.apply(torch.zeros(len(slots), num_ids), ctx)
    return [torch.isfinite(row).nonzero().flatten().tolist() for row in logits]


everything, digits = list(range(num_ids)), [zero, one]
assert begin(2, [9, 9, 9], "start: /[01]{3}/") and not begin(0, [9], "")
# another request beside it, a prompt that is filled in by parts, then rows in another order
assert allowed(s0=1, s2=2) == [everything, everything]
assert allowed(s2=3, s0=1) == [digits, everything]
tokens[2, 3:5] = torch.tensor([one, zero])
assert allowed(s0=2, s2=4) == [everything, digits]
assert allowed(s0=3, s2=5) == [everything, digits]
tokens[2, 5] = one
assert allowed(s0=4, s2=6) == [everything, [stop]]
# taken from its slot and put into another, with what it had; one that goes on after new weights; a slot again
assert begin(1, [9, 9, 9], "start: /[01]{3}/") and begin(3, [9, one, one], "start: /[01]{3}/", 2)
tokens[1, 3:5] = torch.tensor([one, zero])
assert allowed(s1=5, s3=3) == [digits, digits]
tokens[1, 5] = tokens[3, 3] = zero
assert allowed(s3=4, s1=6) == [[stop], [stop]]
assert not begin(1, [9], "") and allowed(s1=1) == [everything]
# one that only this process cannot follow ends its answer, not the server
assert begin(0, [9], "start: <none>") and allowed(s0=1) == [[stop]]
print("held")
"""


@pytest.mark.nightly
def test_slots_of_a_gpu_are_held_to_their_grammars(vllm: str, tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "sf_core").symlink_to(Path(sf_core.__file__).parent)
    model_folders.write_tokenizer(tmp_path)
    ended = subprocess.run(
        [
            vllm,
            "-c",
            SCRIPT,
            tmp_path,
            str(model_folders.STOP),
            str(model_folders.VOCABULARY.index("0")),
            str(len(model_folders.VOCABULARY)),
        ],
        env={"PYTHONPATH": str(tmp_path / "modules"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=patience(300),
        encoding="utf-8",
    )
    assert ended.stdout.endswith("held\n"), ended.stderr[-3000:]
