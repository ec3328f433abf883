"""agent-lightning's LLM proxy in front of an OpenAI-compatible upstream; runs inside its own environment.

    python agentlightning_proxy.py PORT ROLLOUTS READY_FILE MODELS_JSON

Runs in its cheapest recording form: one process with an in-memory store, which saves requests to the store's
server. Writes one path per rollout to READY_FILE once it serves.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from agentlightning import InMemoryLightningStore, LLMProxy  # type: ignore[import-not-found]


async def main(port: int, rollouts: int, ready_file: Path, models: list[dict[str, object]]) -> None:
    store = InMemoryLightningStore(thread_safe=True)
    proxy = LLMProxy(port=port, host="127.0.0.1", model_list=models, store=store, launch_mode="thread")
    await proxy.start()
    paths = []
    for _ in range(rollouts):
        started = await store.start_rollout(input={})
        paths.append(f"/rollout/{started.rollout_id}/attempt/{started.attempt.attempt_id}")
    temporary = ready_file.with_suffix(".tmp")
    temporary.write_text(json.dumps(paths), encoding="utf-8")
    temporary.replace(ready_file)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])))
