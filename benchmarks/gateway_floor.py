"""The least an OpenAI-compatible server can be: raw ASGI under uvicorn, canned answers after the delay of
their tokens. The client's own cost is measured against it, and it is the upstream of the peers.

    python -m benchmarks.gateway_floor PORT_FILE

The path gives the delay of a token in milliseconds: /10/v1/chat/completions.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import orjson
import typer
import uvicorn

from benchmarks.gateway_client import answer_text


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    data = b""
    more = True
    while more:
        event = await receive()
        data = data + event.get("body", b"")
        more = event.get("more_body", False)
    body = orjson.loads(data or b"{}")
    num_tokens = int(body.get("max_tokens", 1))
    if delay_ms := float(scope["path"].split("/")[1] or 0):
        await asyncio.sleep(num_tokens * delay_ms / 1000)
    answer = whole_answer(str(body.get("model", "")), num_tokens, bool(body.get("logprobs")))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


def whole_answer(model: str, num_tokens: int, logprobs: bool) -> bytes:
    text = answer_text(num_tokens)
    entries = [{"token": c, "logprob": -0.5, "bytes": [ord(c)], "top_logprobs": []} for c in text if logprobs]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "length",
        "logprobs": {"content": entries} if logprobs else None,
    }
    usage = {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": num_tokens + 1}
    head = {"id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": model}
    return orjson.dumps(head | {"choices": [choice], "usage": usage})


def main(port_file: Path) -> None:
    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
    temporary = port_file.with_suffix(".tmp")
    temporary.write_text(str(listening.getsockname()[1]), encoding="utf-8")
    temporary.replace(port_file)
    config = uvicorn.Config(
        app, loop="uvloop", http="httptools", access_log=False, log_level="warning", lifespan="off"
    )
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    typer.run(main)
