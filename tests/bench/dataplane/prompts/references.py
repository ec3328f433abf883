"""The same request rendered by us, by transformers and by vLLM: token ids, or None for a refusal."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from sf_core.config.rollout_config import RolloutConfig
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.dialects.registry import find_dialect
from sf_core.dataplane.gateway.normalisation import normalise
from sf_core.dataplane.sessions.session import Prompt, Session
from sf_core.dataplane.turns import opening
from sf_core.process.environment_variables import select_inherited
from tests.bench.dataplane.prompts.folders import folder, renderer, transformers_tokenizer
from tests.bench.dataplane.prompts.shapes import Request, Shape, chat, is_object

Ids = list[int]


def ours(kind: str, tokenizer: str, request: Request) -> Ids | None:
    """As the gateway reads and renders it in a new session."""
    try:
        return open_prompt(kind, tokenizer, request, Session("s")).full_ids().tolist()
    except ApiError:
        return None


def open_prompt(kind: str, tokenizer: str, request: Request, session: Session) -> Prompt:
    """The prompt of a request in a session. Raises ApiError."""
    dialect = find_dialect(request.path)
    assert dialect is not None
    body = dialect.read(json.loads(json.dumps(request.body)), request.path)
    [parsed] = dialect.parse(normalise(body, RolloutConfig().normalised), session)
    return opening.open_prompt(renderer(kind, tokenizer), session, parsed)


def transformers_ids(kind: str, tokenizer: str, shape: Shape) -> Ids | None:
    """What the shape means, as users of transformers write it: arguments as objects, and an effort as the
    variables that templates know."""
    reference = transformers_tokenizer(kind, tokenizer)
    effort = {"enable_thinking": shape.effort != "none", "reasoning_effort": shape.effort}
    effort = effort if shape.effort else {}
    body = chat(replace(shape, reasoning_name="reasoning_content")).body
    for message in body["messages"]:
        for call in message.get("tool_calls", ()):
            if is_object(call["function"]["arguments"]):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        if message["content"] is None:
            message["content"] = ""
    try:
        text = reference.apply_chat_template(
            body["messages"],
            tools=body.get("tools"),
            tokenize=False,
            add_generation_prompt=True,
            **effort | shape.options,
        )
    except Exception:  # a template is a program and may raise anything
        return None
    return list(reference.encode(text, add_special_tokens=False))


class VllmPrompts:
    """vLLM's render routes for some folders, in one process of its environment."""

    def __init__(self, python: str, folders: list[tuple[str, str]], log: Path) -> None:
        command = [python, str(Path(__file__).with_name("vllm_prompts.py"))]
        environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
        with log.open("w", encoding="utf-8") as said:
            self._process = subprocess.Popen(
                [*command, *(folder(*names) for names in folders)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env=select_inherited() | environment,
                encoding="utf-8",
            )

    def ask(self, kind: str, tokenizer: str, request: Request) -> tuple[int, Any]:
        """Status and body of the answer."""
        assert self._process.stdin and self._process.stdout
        body = {name: value for name, value in request.body.items()}
        line = json.dumps([folder(kind, tokenizer), f"{request.path}/render", body])
        print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "vLLM's process ended; its log says why"
        status, body = json.loads(answer)
        return int(status), body

    def ids(self, kind: str, tokenizer: str, request: Request) -> Ids | None:
        status, body = self.ask(kind, tokenizer, request)
        assert status in (200, 400), body
        if status == 400:
            return None
        # a request for completions may have several prompts
        [prompt] = body if isinstance(body, list) else [body]
        return list(prompt["token_ids"])

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
