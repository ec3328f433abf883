"""`sf serve`: the policy of a run, in the foreground, through the gateway."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from sf_core.cli.runs import find_run
from sf_core.cli.serving.local_plane import local_plane
from sf_core.cli.serving.policy import Policy, open_stored
from sf_core.config import RolloutConfig
from sf_core.config.addresses import is_loopback
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.endpoint import send_body
from sf_core.engines.registry import ENGINES
from storage.run_directory import RunDirectory

LOOK_S = 0.5
"""Seconds between looks at the engine."""


def find_policy(name: str, engine: str) -> Policy:
    """The policy that RUN or RUN@VERSION names. Raises ValueError, one sentence, if there is none."""
    if Path(name, "tokenizer.json").is_file():
        hint = f"to ask the model, use `sf try CONFIG --set policy.model={name}`"
        raise ValueError(f"{name} is a model folder, not a run: {hint}")
    uri, _, version = name.rpartition("@")
    if uri and not version.isdecimal():
        uri = ""  # the @ is part of the name
    kind = "torch" if engine == "builtin" else engine
    run = find_run(uri or name)
    if ENGINES[kind].needs_torch:
        # this process loads it in any case, so what asks for torch on the way asks no other process
        import_module("torch")
    return open_stored(run, int(version) if uri else None, kind)


def choose_key(host: str, key: str | None) -> str:
    """The key that clients send. Raises ValueError for an address that others can reach if none is given."""
    if key is None and not is_loopback(host):
        raise ValueError(f"other machines can reach {host}: give a --key, or serve on 127.0.0.1")
    if key is not None and (len(key) < 8 or ":" in key):
        raise ValueError("--key must have 8 characters or more and no colon")
    return key or secrets.token_urlsafe(24)


def check_record(record: Path | None) -> None:
    """Raises ValueError if this is the directory of a run that trains."""
    if record is not None and RunDirectory(str(record)).exists():
        raise ValueError(f"--record {record} is the directory of a run: name another folder")


def describe(policy: Policy, url: str, key: str, record: Path | None) -> str:
    """What a client must know."""
    sessions = f'\n  POST {url}/sessions {{"run_id": "{_name(policy, record)}"}} begins one that is recorded'
    return (
        f"serving {policy.about}, as the model `policy`; Ctrl-C stops\n"
        f"  export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}\n"
        f"  export ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={key}" + (sessions if record else "")
    )


def serve(
    policy: Policy,
    host: str,
    port: int,
    key: str,
    record: Path | None,
    on_serving: Callable[[str], None],
) -> None:
    """Serve until interrupted; `on_serving` gets the URL once the engine answers. Sessions that clients open
    are stored in the run directory `record`.

    Raises ValueError if the engine ends, OSError if the address cannot be bound."""
    with ExitStack() as stack:
        run_dir = str(record) if record else stack.enter_context(tempfile.TemporaryDirectory(prefix="sf-"))
        plane = stack.enter_context(
            local_plane(
                policy,
                name=_name(policy, record),
                run_dir=run_dir,
                rollout=session_rules(policy.config.rollout),
                key=key,
                host=host,
                port=port,
                middleware=None if record else Unrecorded,
            )
        )
        is_told = False
        while not plane.has_failed.wait(LOOK_S):
            if plane.is_serving.is_set() and not is_told:
                is_told = True
                on_serving(plane.url)
        raise ValueError(f"the engine has ended: {plane.failure}")


def _name(policy: Policy, record: Path | None) -> str:
    return policy.run_id if record is None else RunDirectory(str(record)).run_id


def session_rules(rollout: RolloutConfig) -> RolloutConfig:
    """Rules under which nothing trains, and a session has the time that its reward has in a run."""
    time_s = max(rollout.session_timeout_s, rollout.reward_patience_s)
    return rollout.model_copy(update={"outside_groups": 0, "session_timeout_s": time_s})


class Unrecorded:
    """Refuses to open sessions: they are kept until somebody rewards them, and here nothing is kept. Requests
    need none."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] == "/sessions":
            why = "Sessions are not recorded here: ask at /v1, or start `sf serve` with --record DIR."
            refusal = ApiError(409, why, code="not_recorded")
            return await send_body(send, refusal.status, orjson.dumps(refusal.body()))
        await self._app(scope, receive, send)
