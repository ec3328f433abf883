"""Sets up a Prefect server: a work pool for one run at a time, and automations for lost runs.

Existing objects are found by name and changed in place, so that setting up again does no harm.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

OURS = "seamlessflow"
"""Tag of our deployments, so that other flows on the same server are left alone."""

TAG = {"prefect.resource.id": f"prefect.tag.{OURS}", "prefect.resource.role": "tag"}

RETRY_AFTER_S = 20.0
"""Prefect evaluates the automation at this interval: a crashed run restarts after one to two of them."""

ENDED = ("Completed", "Failed", "Crashed", "Cancelled", "Cancelling", "Paused", "Suspended", "AwaitingRetry")


def setup(client: SyncPrefectClient, pool: str, retries: int, silence_s: float) -> list[str]:
    """Create or update the pool and the automations; returns a line about each.

    retries: bound for one flow run. silence_s: seconds without a heartbeat after which a run has crashed."""
    lines = [_put_pool(client, pool)]
    for automation in (crash_silent_runs(silence_s), retry_crashed_runs(pool, retries)):
        existing = client.read_automations_by_name(automation.name)
        if not existing:
            client.create_automation(automation)
        elif not _is(existing[0], automation):
            # an update sends only fields that were set; defaults such as the types of actions were not
            complete = AutomationCore.model_validate(automation.model_dump(exclude={"owner_resource"}))
            client.update_automation(existing[0].id, complete)
        lines.append(f"automation {automation.name!r}: {automation.description}")
    return lines


def crash_silent_runs(silence_s: float) -> AutomationCore:
    """Automation for runs whose process died together with its worker; they would be Running for ever."""
    heartbeat = "prefect.flow-run.heartbeat"
    return AutomationCore(
        name="seamlessflow: crash silent runs",
        description=f"a flow run that sent no heartbeat for {silence_s:g} s is set to Crashed",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            match_related=TAG,
            for_each={"prefect.resource.id"},
            after={heartbeat},
            expect={heartbeat, *(f"prefect.flow-run.{state}" for state in ENDED)},
            within=timedelta(seconds=silence_s),
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED, message=f"no heartbeat for {silence_s:g} s: its process is gone"
            )
        ],
    )


def retry_crashed_runs(pool: str, retries: int) -> AutomationCore:
    """Automation that restarts crashed runs. Prefect sends the number of starts with every change of a flow
    run's state, which bounds the retries. A run that crashed before its first start stays at 0: no retry.

    It waits, because a worker reports a crash twice, seconds apart, and the second report would undo it on a
    server that is not ours (tasks/prefect_server.py)."""
    return AutomationCore(
        name="seamlessflow: retry crashed runs",
        description=f"a flow run that crashed is started again, at most {retries} times",
        enabled=retries > 0,
        trigger=EventTrigger(
            posture=Posture.Proactive,
            match={"prefect.run-count": [str(count) for count in range(1, max(retries, 1) + 1)]},
            match_related={"prefect.resource.role": "work-pool", "prefect.resource.name": pool},
            for_each={"prefect.resource.id"},
            after={"prefect.flow-run.Crashed"},
            # the run was restarted by other means
            expect={f"prefect.flow-run.{state}" for state in ("Scheduled", "AwaitingRetry", "Pending")},
            within=timedelta(seconds=RETRY_AFTER_S),
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.SCHEDULED,
                name="AwaitingRetry",
                message="it crashed; restarted from where its run stopped",
                # like the button Retry: a run that has ended may otherwise not be scheduled
                force=True,
            )
        ],
    )


def _is(existing: Automation, wanted: AutomationCore) -> bool:
    """Whether the automation exists as wanted. Rewriting it would reset the silences that it is measuring: a
    run that is lost already would never be found."""
    ours = AutomationCore.model_fields.keys() - {"owner_resource"}
    return all(getattr(existing, name) == getattr(wanted, name) for name in ours)


def _put_pool(client: SyncPrefectClient, name: str) -> str:
    try:
        client.read_work_pool(name)
        client.update_work_pool(name, WorkPoolUpdate(concurrency_limit=1))
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=name, type="process", concurrency_limit=1))
    return f"work pool {name!r}: one run at a time"


def main(pool: str, retries: str, silence_s: str) -> str | None:
    """Returns one sentence if the server cannot be set up."""
    with get_client(sync_client=True) as client:
        try:
            for line in setup(client, pool, int(retries), float(silence_s)):
                print(line)
        except (httpx.TransportError, OSError):
            return f"no Prefect server answers at {client.api_url}: start one, or set PREFECT_API_URL"
        except PrefectHTTPStatusError as error:
            return (
                f"the Prefect server at {client.api_url} refused the request: {' '.join(str(error).split())}"
            )
    return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
