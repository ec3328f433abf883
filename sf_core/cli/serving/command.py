"""The command `sf serve`. What it does is in serve.py, which is imported when it is called."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Literal

import typer

from sf_core.cli.terminal import interrupt, report_bad_input, tell
from sf_core.config.addresses import LOOPBACK, MAX_PORT

commands = typer.Typer()


@commands.command()
@report_bad_input()
def serve(
    run: Annotated[
        str,
        typer.Argument(help="Run, whose newest version is served, or RUN@VERSION.", show_default=False),
    ],
    host: Annotated[str, typer.Option(help="Address; others than loopback need a --key.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=0, max=MAX_PORT, help="Port; 0 picks a free one.")] = 8800,
    key: Annotated[
        str | None, typer.Option(help="Key that clients send; by default one is made.", show_default=False)
    ] = None,
    engine: Annotated[
        Literal["builtin", "vllm"], typer.Option(help="What samples: the built-in engine, or a vLLM server.")
    ] = "builtin",
    record: Annotated[
        Path | None,
        typer.Option(
            help="Folder for finished sessions. By default clients cannot open any.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve a run's policy in the foreground, by all APIs of the gateway, until Ctrl-C. Trains nothing."""
    from sf_core.cli.serving.serve import check_record, choose_key, describe, find_policy
    from sf_core.cli.serving.serve import serve as serve_policy

    signal.signal(signal.SIGTERM, interrupt)
    try:
        used = choose_key(host, key)
        check_record(record)
        policy = find_policy(run, engine)
        tell(f"loading {policy.about}")
        serve_policy(policy, host, port, used, record, lambda url: tell(describe(policy, url, used, record)))
    except KeyboardInterrupt:
        tell("stopped")
