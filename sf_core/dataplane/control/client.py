"""HTTP client of the data plane's control routes, for flows, tasks and commands. One method per route."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import httpx
import msgspec
import orjson
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from sf_core.dataplane.api_schemas import EngineStatus, RunStatus
from sf_core.waits import Wait, waiting_for

CONNECT_S = 5.0
ANSWER_S = 120.0

LONG_POLL_S = 10.0
"""Seconds for which one request waits for a batch before it is repeated."""

ENGINE_PATIENCE_S = 720.0
"""Seconds to wait for an answer that needs the engines: longer than the data plane itself waits for them,
which is `engine_silence_s`."""

MAX_FAILURES_IN_A_ROW = 100
"""Failed sessions in a row that end a wait, because the agent or the reward must be broken."""


@cache
def tls() -> ssl.SSLContext:
    """Cached, because loading certificate authorities takes 20 ms of CPU, and every task makes a client."""
    return httpx.create_ssl_context()


class DataplaneError(RuntimeError):
    """The data plane refused a call; the message ends with its reason."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the answer."""

    def __reduce__(self) -> tuple[type[DataplaneError], tuple[str, int]]:
        # tasks raise it on other machines; by default exceptions are unpickled from their message alone
        return type(self), (str(self), self.status)


UNANSWERED = (httpx.HTTPError, DataplaneError)
"""Errors of a data plane that is away or does not know the run."""


def _is_temporary(error: BaseException) -> bool:
    is_refused = isinstance(error, DataplaneError) and error.status == 503
    return is_refused or isinstance(error, httpx.TransportError)


class DataplaneClient:
    """Control calls of one run. Connection failures and status 503 are retried until `patience_s`: the data
    plane may be restarting, and losing a run to that would be worse than waiting."""

    def __init__(
        self,
        url: str,
        run_id: str,
        key: str | None = None,
        *,
        patience_s: float = 60.0,
        timeout_s: float = ANSWER_S,
    ) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
        # given a transport, it uses no proxy that the environment names
        direct = httpx.HTTPTransport(verify=tls())
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout, transport=direct)
        self._run = f"/runs/{run_id}"
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._stage: dict[str, Any] | None = None
        """The stage that was last reported; a long wait is shown with it."""

    def register(self, **spec: Any) -> dict[str, Any]:
        return self._post("/runs", spec)

    def status(self) -> RunStatus:
        return self._call("GET", self._run)

    def report_stage(self, iteration: int, stage: str, **facts: Any) -> None:
        self._stage = {"iteration": iteration, "stage": stage, **facts}
        self._post(f"{self._run}/stage", self._stage)

    def wait_for_batch(self, iteration: int, timeout_s: float, absence_timeout_s: float) -> None:
        """Return when the batch is ready. Raises TimeoutError that says what it waited for, at the latest
        after `absence_timeout_s` without an engine or without an agent runner, and RuntimeError if all
        sessions fail, the run is released or the data plane has found a fault that ends it."""
        where = f"{self._run}/batches/{iteration}"
        self._wait(where, "ready", f"batch {iteration}", timeout_s, absence_timeout_s)

    def seal_batch(self, iteration: int, attempt: int) -> dict[str, Any]:
        return self._post(f"{self._run}/batches/{iteration}/seal", {"attempt": attempt})

    def start_evaluation(self, version: int, num_tasks: int) -> None:
        self._post(f"{self._run}/evaluations/{version}", {"num_tasks": num_tasks})

    def wait_for_evaluation(self, version: int, timeout_s: float, absence_timeout_s: float) -> None:
        """Like `wait_for_batch`, until every session of the evaluation is done."""
        where = f"{self._run}/evaluations/{version}"
        self._wait(where, "done", "the evaluation", timeout_s, absence_timeout_s)

    def seal_evaluation(self, version: int, attempt: int) -> dict[str, Any]:
        return self._post(f"{self._run}/evaluations/{version}/seal", {"attempt": attempt})

    def publish(self, version: int, uri: str) -> dict[str, Any]:
        """Have every engine load these weights; engines that are still starting may load them after the
        return. Raises TimeoutError that names the others that have not."""
        return self._post_to_engines(
            f"{self._run}/weights",
            {"version": version, "uri": uri},
            f"every engine to take version {version}",
            lambda engine: engine["version"] not in (None, version),
        )

    def revoke(self, lease_id: str, within_s: float) -> dict[str, Any]:
        """Have the engine of a lease yield. One that has not yielded in time is dropped: what it was
        generating continues elsewhere."""
        return self._post_to_engines(
            f"{self._run}/leases/{lease_id}/revoke",
            {"within_s": within_s},
            f"lease {lease_id} to yield",
            lambda engine: engine["state"] != "serving",
            patience_s=within_s + ANSWER_S,
        )

    def release(self, attempt: int) -> None:
        """Release runners and engines. No effect for an attempt that was superseded: its own are gone, and
        those that are there belong to the later one."""
        self._post(f"{self._run}/release", {"attempt": attempt})

    def _wait(self, path: str, flag: str, what: str, timeout_s: float, absence_timeout_s: float) -> None:
        attended = time.monotonic()
        with waiting_for(what, timeout_s, tell=self._show) as wait:
            while True:
                wait_s = min(LONG_POLL_S, wait.left_s, absence_timeout_s)
                answer = self._call("GET", path, params={"wait_s": wait_s})
                now = time.monotonic()
                if answer["fault"]:
                    raise RuntimeError(f"{what}: {answer['fault']}")
                if answer[flag]:
                    return
                wait.reason = answer["waiting_for"]
                if answer["released"]:
                    raise RuntimeError(
                        f"{what}: the data plane has released the run, so no worker works on it"
                    )
                if answer["failures_in_a_row"] >= MAX_FAILURES_IN_A_ROW:
                    raise RuntimeError(f"{what}: every session fails; {wait.reason}")
                if answer["engines"] and answer["runners"] != 0:
                    attended = now
                elif now - attended > absence_timeout_s:
                    raise TimeoutError(
                        f"{what}: no engine or no agent runner was connected for {absence_timeout_s:g} s, "
                        f"the most that rollout.absence_timeout_s allows; {wait.reason}"
                    )
                wait.check()

    def _post_to_engines(
        self,
        path: str,
        body: dict[str, Any],
        what: str,
        is_awaited: Callable[[EngineStatus], bool],
        patience_s: float = ENGINE_PATIENCE_S,
    ) -> dict[str, Any]:
        def tell_awaited() -> str:
            with suppress(httpx.HTTPError):
                response = self._http.get(self._run, timeout=2.0).raise_for_status()
                engines = [e for e in response.json()["engines"] if is_awaited(e)]
                return ", ".join(f"engine {e['id']} is {e['state']}" for e in engines)
            return "the data plane does not answer"

        with waiting_for(what, patience_s, reason=tell_awaited, tell=self._show) as wait:
            try:
                return self._post(path, body, timeout_s=patience_s)
            except httpx.ReadTimeout:
                raise wait.over() from None

    def _show(self, wait: Wait) -> None:
        """Show a long wait in the run's status until another stage is reported."""
        if self._stage is not None:
            with suppress(httpx.HTTPError):
                self._http.post(f"{self._run}/stage", json={**self._stage, "wait": wait.facts()}, timeout=2.0)

    def _post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        timeout = httpx.Timeout(timeout_s or self._timeout_s, connect=CONNECT_S)
        return self._call("POST", path, content=orjson.dumps(body), timeout=timeout)

    def _call(self, method: str, path: str, **request: Any) -> Any:
        for attempt in Retrying(
            retry=retry_if_exception(_is_temporary),
            stop=stop_after_delay(self._patience_s),
            wait=wait_exponential(multiplier=0.05, max=2.0),
            reraise=True,
        ):
            with attempt:
                response = self._request(method, path, **request)
                if response.status_code >= 400:
                    message = f"{method} {path}: {refusal_of(response)}"
                    if response.status_code == 401:
                        url = self._http.base_url
                        message += f" Set SF_DATAPLANE_KEY to the key of the data plane at {url}."
                    raise DataplaneError(message, response.status_code)
        return msgspec.json.decode(response.content)

    def _request(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **request)
        except httpx.TransportError as error:
            # of the same type, but it says which address and where that is set
            where = f"no data plane answers at {self._http.base_url} (dataplane.url, or SF_DATAPLANE_URL)"
            raise type(error)(
                f"{where}: {str(error) or type(error).__name__}", request=error.request
            ) from error


def refusal_of(response: httpx.Response) -> str:
    """The reason in an error response."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}: {response.text[:200]}"
