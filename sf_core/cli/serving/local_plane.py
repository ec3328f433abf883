"""A data plane and one engine in threads of this process."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from starlette.types import ASGIApp

from sf_core.cli.serving.app_thread import END_S, serve_app
from sf_core.cli.serving.policy import Policy
from sf_core.cli.terminal import hide_progress_bars
from sf_core.config import RolloutConfig
from sf_core.config.addresses import LOOPBACK
from sf_core.dataplane.control.app import make_app
from sf_core.dataplane.control.client import DataplaneClient
from sf_core.dataplane.options import DataplaneOptions
from sf_core.dataplane.runs.run import ServedRun
from sf_core.engines.drivers.serve import serve_engine
from sf_core.engines.registry import engine_kind, follows_grammars, make_engine
from sf_core.engines.wire import Hello


class LocalPlane:
    """The data plane of one run, whose engine is loading or serves."""

    def __init__(self, url: str, run: ServedRun) -> None:
        self.url = url
        self.run = run
        self.is_serving = threading.Event()
        self.failure: BaseException | None = None
        """What ended the engine, if anything did."""
        self.has_failed = threading.Event()


@contextmanager
def local_plane(
    policy: Policy,
    *,
    name: str,
    run_dir: str,
    rollout: RolloutConfig,
    key: str | None = None,
    host: str = LOOPBACK,
    port: int = 0,
    middleware: Callable[[ASGIApp], ASGIApp] | None = None,
) -> Iterator[LocalPlane]:
    """Serve a policy on this address. `key` opens the agents' routes of the run; the others are open to this
    process alone. Raises OSError if the address cannot be bound."""
    own_key = secrets.token_hex(16)
    app = make_app(own_key, DataplaneOptions())
    if middleware is not None:
        # around it, the application would have no routes in which the server finds its WebSockets
        app.add_middleware(middleware)
    with serve_app(app, host, port) as url:
        client = DataplaneClient(url, name, own_key)
        config = policy.config
        weights = policy.weights
        client.register(
            run_id=name,
            run_dir=run_dir,
            model_dir=policy.start_dir,
            seed=config.seed,
            rollout=rollout.model_dump(),
            lag_bound=0,
            context_length=config.engine.context,
            follows_grammars=follows_grammars(config),
            num_batches=weights.version + 1,
            iteration=weights.version,
            version=weights.version,
            weights_uri=weights.uri,
            done_groups=[],
            attempt=1,
            key=key,
        )
        plane = LocalPlane(url, app.state.plane.run(name))
        serving = threading.Thread(
            target=_serve_engine, args=(plane, policy, name, run_dir, own_key), name="engine", daemon=True
        )
        serving.start()
        try:
            yield plane
        finally:
            client.release(1)
            serving.join(END_S)


def _serve_engine(plane: LocalPlane, policy: Policy, name: str, run_dir: str, key: str) -> None:
    # the engine reads images from where the gateway stores them
    root, _, run_id = run_dir.rstrip("/").rpartition("/")
    config = policy.config.put(["storage", "root"], root).put(["run_id"], run_id)
    hello = Hello(name, 1, "local", 0, "local", "local", policy.config.engine.max_running)
    engine: Any = None
    try:
        if engine_kind(policy.config).needs_torch:
            hide_progress_bars()
        engine = make_engine(config, policy.start_dir)
        serve_engine(plane.url, key, hello, engine, on_ready=plane.is_serving.set)
    except BaseException as error:  # told to whoever waits for the engine
        plane.failure = error
        plane.has_failed.set()
    finally:
        if engine is not None:
            with suppress(Exception):
                engine.close()
