"""The render routes of `vllm.entrypoints.launchers.render.entry`, for many model folders in one process:
importing vLLM takes longer than all the rest. Runs on its own, in vLLM's environment.

Arguments: the folders. Each line of standard input is `[folder, path, body]`, each line of standard output
the answer, `[status, body]`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

OUTPUT = os.dup(1)
"""What libraries print goes to standard error."""
os.dup2(2, 1)

import httpx  # noqa: E402
from vllm import AsyncEngineArgs  # noqa: E402
from vllm.config import VllmConfig  # noqa: E402
from vllm.entrypoints.launchers.app import build_app  # noqa: E402
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args  # noqa: E402
from vllm.entrypoints.launchers.render.app_state import init_render_app_state  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402


async def open_folder(folder: str) -> httpx.AsyncClient:
    """The application that the launcher serves for this folder."""
    # a parser without an influence on prompts: without one vLLM refuses requests with tools
    given = ["--model", folder, "--served-model-name", "policy", "--enable-auto-tool-choice"]
    given += ["--tool-call-parser", "hermes"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(given)
    validate_parsed_serve_args(args)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = VllmConfig(
        model_config=engine_args.create_model_config(),
        structured_outputs_config=engine_args.create_structured_outputs_config(),
    )
    app = build_app(args, ("render",))
    await init_render_app_state(config, app.state, args)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://vllm")


async def main(folders: list[str]) -> None:
    clients = {folder: await open_folder(folder) for folder in folders}
    with os.fdopen(OUTPUT, "w", encoding="utf-8") as output:
        for line in sys.stdin:
            folder, path, body = json.loads(line)
            headers = {"content-type": "application/json"}
            reply = await clients[folder].post(path, content=json.dumps(body), headers=headers)
            answer: Any = reply.json() if "json" in reply.headers.get("content-type", "") else reply.text
            print(json.dumps([reply.status_code, answer]), file=output, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
