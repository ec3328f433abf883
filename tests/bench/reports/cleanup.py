"""Runs that a data plane serves while others clean up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from sf_core.config import PolicyConfig
from sf_core.dataplane.operator_key import account_key
from sf_core.models.builtin import make_policy
from tests.bench.dataplane.planes import ServedPlane, running_app


@contextmanager
def served(
    root: Path, name: str, key: str | None = None, port: int = 0
) -> Iterator[tuple[str, httpx.Client]]:
    """A data plane that serves a run of this name."""
    model = root.parent / "model"
    make_policy(str(model), PolicyConfig(hidden_size=32, num_layers=1), seed=0)
    headers = {"Authorization": f"Bearer {key or account_key()}"}
    with running_app(key=key, port=port) as url, httpx.Client(base_url=url, headers=headers) as http:
        ServedPlane(url, http, root, str(model)).register(run_id=name, run_dir=str(root / name))
        yield url, http
