"""Finds the run and the session of a request, by the session or model that it names and by its key."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from starlette.types import Scope

from sf_core.dataplane.api_schemas import RunSpec
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.keys import Caller
from sf_core.dataplane.sessions.session import Session
from sf_core.dataplane.turns.live_turn import LiveTurns


class Run(Protocol):
    """The parts of a run that requests of agents use."""

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
        self._unnamed_numbers = itertools.count(1)

    def find_session(self, scope: Scope, model: str) -> tuple[LiveTurns, Session]:
        """The session of a request. Without a session id it is a new external one, for this request alone, of
        the newest run that serves this model. Raises ApiError, 503 if all runs that serve the model have
        ended."""
        caller: Caller = scope["caller"]
        if caller.named_session is None:
            usable = self._usable_runs(caller)
            serving = [run for run in usable if run.turns.spec.served_model == model]
            if not serving:
                models = sorted({run.turns.spec.served_model for run in usable})
                remedy = "; `sf serve RUN` serves the policy of a run that has ended"
                raise no_model(model, f"; existing models: {', '.join(models)}" if models else remedy)
            run = min(serving, key=lambda run: run.released)
            if run.released:
                raise run.refusal()
            return run.turns, Session(f"{run.turns.spec.run_id}.adhoc.{next(self._unnamed_numbers)}")
        run, session = self._find_named(caller.named_session, caller, caller.works_in)
        if model != run.turns.spec.served_model:
            raise no_model(model)
        return run.turns, session

    def owned_session(self, session_id: str, caller: Caller) -> tuple[Host, Session]:
        """An open session that the caller may read, reward and finish, and its run. Raises ApiError 404, and
        401 if the caller may not."""
        return self._find_named(session_id, caller, caller.owns)

    def list_models(self, caller: Caller) -> list[str]:
        """Names of the models that the caller may use, in its session if it names one."""
        if caller.named_session is not None:
            run, _ = self._find_named(caller.named_session, caller, caller.works_in)
            return [run.turns.spec.served_model]
        return sorted({run.turns.spec.served_model for run in self._usable_runs(caller)})

    def _usable_runs(self, caller: Caller) -> list[Host]:
        """The runs of which the caller is a client, newest first. Raises ApiError 401 if there are only other
        runs."""
        usable = [run for run in reversed(self._runs.values()) if caller.is_client_of(run.turns.spec)]
        if self._runs and not usable:
            raise caller.refusal()
        return usable

    def _find_named(
        self, session_id: str, caller: Caller, is_allowed: Callable[[RunSpec, Session], bool]
    ) -> tuple[Host, Session]:
        for run in self._runs.values():
            if (session := run.turns.sessions.get(session_id)) is not None:
                if not is_allowed(run.turns.spec, session):
                    raise caller.refusal()
                return run, session
        if not self._may_know(session_id, caller):
            raise caller.refusal()
        raise no_session(session_id)

    def _may_know(self, session_id: str, caller: Caller) -> bool:
        """Whether the caller may learn that a session does not exist."""
        specs = [run.turns.spec for run in self._runs.values()]
        is_known = any(caller.is_client_of(spec) or caller.is_agent_of(spec, session_id) for spec in specs)
        return is_known or caller.is_operator or caller.is_welcome


def no_session(session_id: str) -> ApiError:
    return ApiError(404, f"Session {session_id} is unknown or has ended.", code="session_not_found")


def no_model(model: str, remedy: str = "") -> ApiError:
    message = f"The model {model!r} does not exist here{remedy}."
    return ApiError(404, message, code="model_not_found", param="model")
