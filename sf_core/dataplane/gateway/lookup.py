"""Finds the run and the session of a request, by the session or model that it names and by its key."""

from __future__ import annotations

import itertools
from typing import Generic, Protocol, TypeVar

from starlette.types import Scope

from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.keys import Caller, wrong_key
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.turns.live_turn import LiveTurns


class Run(Protocol):
    """A run as requests of agents find it."""

    @property
    def turns(self) -> LiveTurns: ...

    @property
    def released(self) -> bool: ...

    def refusal(self) -> ApiError: ...


Host = TypeVar("Host", bound=Run)


class Lookup(Generic[Host]):
    def __init__(self, runs: dict[str, Host]) -> None:
        """`runs` may change at any time."""
        self._runs = runs
        self._ad_hoc_numbers = itertools.count(1)

    def find_session(self, scope: Scope, model: str) -> tuple[LiveTurns, Session]:
        """The session of a request. Without a session id it is a new ad-hoc one
        of the newest run that serves this model. Raises ApiError, 503 if all that serve it have ended."""
        caller: Caller = scope["caller"]
        session_id = caller.session_id(scope)
        if session_id is None:
            newest_first = reversed(self._runs.values())
            usable = [run for run in newest_first if caller.may_use(run.turns.spec)]
            serving = [run for run in usable if run.turns.spec.served_model == model]
            if not serving:
                served = sorted({run.turns.spec.served_model for run in usable})
                others = f"; existing models: {', '.join(served)}" if served else ""
                raise no_model(model, others or "; `sf serve RUN` serves the policy of a run that has ended")
            run = min(serving, key=lambda run: run.released)
            if run.released:
                raise run.refusal()
            return run.turns, Session(f"{run.turns.spec.run_id}.adhoc.{next(self._ad_hoc_numbers)}")
        run, session = self.session(session_id, caller)
        if model != run.turns.spec.served_model:
            raise no_model(model)
        return run.turns, session

    def session(self, session_id: str, caller: Caller) -> tuple[Host, Session]:
        """An open session and its run. Raises ApiError 404, and 401 if the caller may not use it."""
        for run in self._runs.values():
            if (session := run.turns.sessions.get(session_id)) is not None:
                return check_allowed(run, caller), session
        raise ApiError(404, f"Session {session_id} is unknown or has ended.", code="session_not_found")

    def list_models(self, session_id: str | None, caller: Caller) -> list[str]:
        runs = self._runs.values() if session_id is None else [self.session(session_id, caller)[0]]
        return sorted({run.turns.spec.served_model for run in runs if caller.may_use(run.turns.spec)})


def check_allowed(run: Host, caller: Caller) -> Host:
    """The run, if the caller may use it. Raises ApiError 401."""
    if not caller.may_use(run.turns.spec):
        raise wrong_key()
    return run


def no_model(model: str, when: str = "") -> ApiError:
    message = f"The model {model!r} does not exist here{when}."
    return ApiError(404, message, code="model_not_found", param="model")
