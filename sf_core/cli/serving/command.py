"""The command `sf serve`. What it does is in serve.py, which is imported when it is called."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Literal

import typer

from sf_core.cli.arguments.addresses import AnyPort, address
from sf_core.cli.arguments.completion import complete_run
from sf_core.cli.arguments.groups import App
from sf_core.cli.terminal import interrupt, report_bad_input, tell
from sf_core.config.addresses import LOOPBACK, check_free

commands = App()


@commands.command()
@report_bad_input()
def serve(
    run: Annotated[
        str,
        typer.Argument(
            help="Run directory, name of a run in ./runs, or RUN@VERSION. The default is the newest version.",
            autocompletion=complete_run,
        ),
    ],
    host: Annotated[str, address("--key")] = LOOPBACK,
    port: Annotated[int, AnyPort] = 8800,
    key: Annotated[
        str | None,
        typer.Option(help="Key that clients must send. By default the command generates a random key."),
    ] = None,
    engine: Annotated[
        Literal["builtin", "vllm"],
        typer.Option(help="Engine that samples: the built-in engine or a vLLM server."),
    ] = "builtin",
    record: Annotated[
        Path | None,
        typer.Option(help="Folder in which sessions are recorded. By default no session is recorded."),
    ] = None,
) -> None:
    """Serve the policy of a run through the OpenAI, Anthropic and Google APIs, until Ctrl-C."""
    from sf_core.cli.serving.serve import check_record, choose_key, describe, find_policy
    from sf_core.cli.serving.serve import serve as serve_policy

    signal.signal(signal.SIGTERM, interrupt)
    try:
        used = choose_key(host, key)
        # the policy may take minutes to load
        check_free(host, port)
        check_record(record)
        policy = find_policy(run, engine)
        tell(f"loading {policy.about}")
        serve_policy(policy, host, port, used, record, lambda url: tell(describe(policy, url, used, record)))
    except KeyboardInterrupt:
        tell("stopped")
