"""`sf serve --engine vllm`."""

from __future__ import annotations

from pathlib import Path

import openai

from tests.bench.policy_server import KEY, Served, publish_run


def test_a_stored_policy_is_served_by_vllm(vllm: None, tmp_path: Path) -> None:
    # its CPU build knows no narrower heads
    run = publish_run(tmp_path, hidden_size=64)
    served = Served(run.uri, "--engine", "vllm", log=tmp_path / "log")
    try:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0) as client:
            reply = client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "hi"}], max_tokens=4
            )
        assert reply.usage is not None
        assert reply.usage.completion_tokens in range(1, 5)
    finally:
        code = served.end()
    assert (code, served.output.splitlines()[-1]) == (0, "stopped")
