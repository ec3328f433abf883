"""How flows, tasks and agent runners talk to the data plane. One method per route; no state of its own."""

from __future__ import annotations

import time
from typing import Any

import httpx
import orjson
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

MAX_FAILURES_IN_A_ROW = 100
"""So many failed sessions without one that finishes are no bad luck: the agent or the reward is broken."""


class DataplaneError(RuntimeError):
    """The data plane refused a call; the message is its sentence."""


class _UnavailableError(DataplaneError):
    """Refused for now: worth another try."""


class DataplaneClient:
    """Control calls of one run. Connection failures and status 503 are retried until `patience_s`: the data
    plane may be restarting, and losing a run to that would be worse than waiting."""

    def __init__(self, url: str, run_id: str, key: str | None = None, *, patience_s: float = 60.0) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(120.0, connect=5.0))
        self._run = f"/runs/{run_id}"
        self._patience_s = patience_s

    def register(self, **spec: Any) -> dict[str, Any]:
        return self._post("/runs", spec)

    def status(self) -> dict[str, Any]:
        return self._call("GET", self._run)

    def report_stage(self, iteration: int, stage: str, **facts: Any) -> None:
        self._post(f"{self._run}/stage", {"iteration": iteration, "stage": stage, **facts})

    def wait_for_batch(self, iteration: int, timeout_s: float, unmanned_s: float = 120.0) -> None:
        """Return when the batch is ready. Raises TimeoutError that says what it waited for, or RuntimeError
        if sessions do nothing but fail."""
        self._wait(f"{self._run}/batches/{iteration}", "ready", f"batch {iteration}", timeout_s, unmanned_s)

    def seal_batch(self, iteration: int, attempt: int) -> dict[str, Any]:
        return self._post(f"{self._run}/batches/{iteration}/seal", {"attempt": attempt})

    def start_evaluation(self, version: int, num_tasks: int) -> None:
        self._post(f"{self._run}/evaluations/{version}", {"num_tasks": num_tasks})

    def wait_for_evaluation(self, version: int, timeout_s: float, unmanned_s: float = 120.0) -> None:
        where = f"{self._run}/evaluations/{version}"
        self._wait(where, "done", f"evaluation of version {version}", timeout_s, unmanned_s)

    def seal_evaluation(self, version: int, attempt: int) -> dict[str, Any]:
        return self._post(f"{self._run}/evaluations/{version}/seal", {"attempt": attempt})

    def publish(self, version: int, uri: str) -> dict[str, Any]:
        return self._post(f"{self._run}/weights", {"version": version, "uri": uri})

    def revoke(self, lease_id: str, within_s: float) -> dict[str, Any]:
        """An engine that has not yielded in time is dropped: what it was generating continues elsewhere."""
        where = f"{self._run}/leases/{lease_id}/revoke"
        return self._post(where, {"within_s": within_s}, timeout=within_s + 30.0)

    def release(self) -> None:
        self._post(f"{self._run}/release", {})

    def _wait(self, path: str, flag: str, what: str, timeout_s: float, unmanned_s: float) -> None:
        started = manned = time.monotonic()
        while True:
            answer = self._call("GET", path, params={"wait_s": 10})
            now = time.monotonic()
            if answer[flag]:
                return
            if answer["failures_in_a_row"] >= MAX_FAILURES_IN_A_ROW:
                raise RuntimeError(f"{what}: every session fails; {answer['waiting_for']}")
            if answer["engines"] and answer["runners"]:
                manned = now
            elif now - manned > unmanned_s:
                raise TimeoutError(f"{what}: nothing moved for {unmanned_s:.0f} s: {answer['waiting_for']}")
            if now - started > timeout_s:
                raise TimeoutError(f"{what} was not ready after {timeout_s:.0f} s: {answer['waiting_for']}")

    def _post(self, path: str, body: dict[str, Any], **request: Any) -> dict[str, Any]:
        return self._call("POST", path, content=orjson.dumps(body), **request)

    def _call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        for attempt in Retrying(
            retry=retry_if_exception_type((httpx.TransportError, _UnavailableError)),
            stop=stop_after_delay(self._patience_s),
            wait=wait_exponential(multiplier=0.05, max=2.0),
            reraise=True,
        ):
            with attempt:
                response = self._http.request(method, path, **request)
                if response.status_code == 503:
                    raise _UnavailableError(f"{method} {path}: {_message(response)}")
        if response.status_code >= 400:
            raise DataplaneError(f"{method} {path}: {_message(response)}")
        answer: dict[str, Any] = orjson.loads(response.content)
        return answer


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}: {response.text[:200]}"
