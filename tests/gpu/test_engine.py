"""The torch engine in bfloat16."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from sf_core.config import RunConfig
from sf_core.engines.registry import make_engine
from sf_core.testing.driven_engine import DrivenEngine
from sf_core.testing.engines import awake, drain
from sf_core.types import GenerationRequest, Sampling, WeightsRef


def test_log_probs_are_those_of_transformers_and_a_rest_gives_the_memory_back(gpu_policy: str) -> None:
    config = {"engine": {"max_running": 64, "context_length": 512}, "policy": {"dtype": "bfloat16"}}
    engine = DrivenEngine(make_engine(RunConfig.model_validate(config), gpu_policy))
    model = AutoModelForCausalLM.from_pretrained(gpu_policy, dtype=torch.bfloat16).cuda().eval()
    before = torch.cuda.memory_allocated()
    awake(engine, WeightsRef(0, gpu_policy))
    requests = [GenerationRequest(str(i), [5 + i, 6, 7 + i], 0, 200, (), Sampling(seed=i)) for i in range(96)]
    for request in requests:
        engine.submit(request)
    chunks = drain(engine)
    differences = []
    for request in requests:
        own = [chunk for chunk in chunks if chunk.request_id == request.request_id]
        ids = [*request.prompt_ids, *(token for chunk in own for token in chunk.token_ids)]
        with torch.inference_mode():
            scores = model(torch.tensor([ids[:-1]], device="cuda")).logits[0].float().log_softmax(-1)
        start = len(request.prompt_ids)
        targets = torch.tensor(ids[start:], device="cuda")
        expected = scores[start - 1 :].gather(1, targets[:, None])[:, 0].cpu()
        told = torch.tensor([logprob for chunk in own for logprob in chunk.logprobs])
        differences.append((told - expected).abs())
    assert float(torch.cat(differences).mean()) < 0.02
    used = torch.cuda.memory_allocated() - before
    engine.rest()
    assert torch.cuda.memory_allocated() - before < used / 10
    engine.close()
