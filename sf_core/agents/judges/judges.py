"""The judges of a runner, by their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sf_core.agents.judges.client import JudgeClient
from sf_core.agents.judges.judge import Judge, Record
from sf_core.config.rollout_config import JudgeConfig
from sf_core.environment_variables import judge_key
from sf_core.settings import quote
from sf_core.types import Endpoint


class Judges:
    """Must be entered before one of them is asked."""

    def __init__(self, settings: Mapping[str, JudgeConfig], endpoints: Mapping[str, Endpoint]) -> None:
        """`endpoints` says where each judge is; an empty model is that which the server lists first."""
        self._clients = {
            name: JudgeClient(name, config, endpoints[name]) for name, config in settings.items()
        }

    async def __aenter__(self) -> Judges:
        for client in self._clients.values():
            client.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients.values():
            await client.close()

    @contextmanager
    def record(self) -> Iterator[tuple[Mapping[str, Judge], Record]]:
        """The judges for the scoring of one answer, or of a group's, and what is recorded of it."""
        record = Record()
        try:
            yield _Named({name: Judge(client, record) for name, client in self._clients.items()}), record
        finally:
            record.end()


class _Named(dict[str, Judge]):
    def __missing__(self, name: str) -> Judge:
        raise ValueError(f"unknown judge {quote(name)}; use one of {', '.join(self)} (environment.judges)")


def endpoint_of(name: str, settings: JudgeConfig) -> Endpoint:
    """Where a judge with a `url` is. Its key is in the environment (SF_JUDGE_KEY_NAME), never in files."""
    assert settings.url is not None
    return Endpoint(settings.url, judge_key(name), settings.name or "")


def takes_judges(function: Callable[..., Any]) -> bool:
    """Whether a reward function is given the judges, as its parameter `judges`."""
    try:
        return "judges" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in another language
        return False
