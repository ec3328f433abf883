"""Use of the Prefect UI in a real browser: start a run from the form, watch it, press Retry after a fault,
press Cancel."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from playwright.sync_api import Browser, expect
from prefect.client.schemas.actions import ArtifactCreate, DeploymentUpdate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelled

from sf_core.config import RunConfig
from sf_core.config.programs import Command
from sf_core.config.reference.form import unfold
from sf_core.recipes.curriculum import Curriculum, Stage
from sf_core.recipes.gates import Mixed
from sf_core.recipes.losses import Cispo
from sf_core.recipes.outcomes import Success
from sf_core.reports.run_page import show_text
from storage.run_directory import RunDirectory
from storage.tables.outcomes import read_outcomes
from tests import bench
from tests.bench.stacks import prefect_server
from tests.e2e import prefect_ui

PICTURES = os.environ.get("SF_TEST_PICTURES")
"""A folder for screenshots; those in docs/ are made with it."""

STOPPED_S = 15.0
"""Longest time from Cancel to the end of all device work."""


def picture(ui: prefect_ui.PrefectUi, name: str) -> None:
    if PICTURES:
        ui.picture(Path(PICTURES) / f"{name}.png")


def deployment_id(server: prefect_server.Server, name: str) -> UUID:
    with server.client() as client:
        return client.read_deployment_by_name(prefect_server.DEPLOYMENTS[name]).id


def offer(server: prefect_server.Server, deployment: UUID, config: RunConfig) -> None:
    """Make this configuration the default of the deployment's form."""
    parameters = {"config": config.model_dump(mode="json", exclude_defaults=True)}
    with server.client() as client:
        client.update_deployment(deployment, DeploymentUpdate(parameters=parameters))


def submit(server: prefect_server.Server, deployment: UUID, ui: prefect_ui.PrefectUi) -> FlowRun:
    """Submit the form; returns the new flow run."""

    def runs() -> dict[UUID, FlowRun]:
        chosen = DeploymentFilter(id=DeploymentFilterId(any_=[deployment]))
        with server.client() as client:
            return {run.id: run for run in client.read_flow_runs(deployment_filter=chosen)}

    known = runs().keys()
    ui.submit()
    started: FlowRun = bench.waits.wait_until(
        lambda: next((run for key, run in runs().items() if key not in known), None),
        "the flow run of the form",
        every_s=0.5,
    )
    return started


def settings_of(run: FlowRun) -> RunConfig:
    """The settings that the form has sent."""
    return RunConfig.model_validate(unfold(run.parameters["config"]))


def engines(cluster: bench.stacks.cluster.Cluster, config: RunConfig) -> list[Any]:
    with bench.dataplane.planes.operator_client(cluster.services.dataplane) as plane:
        status = plane.get(f"/runs/{config.run_id}").raise_for_status().json()
    return list(status["engines"])


# 600 s on slow cores; deployed runs are in test_deployments.py and test_lost_runs.py
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_run_is_started_watched_retried_and_cancelled_in_the_browser(
    server: prefect_server.Server, cluster: bench.stacks.cluster.Cluster, browser: Browser
) -> None:
    reward = {"reward": "tests.bench.stacks.echo_package:picky_reward"}
    config = prefect_server.without_addresses(cluster.config("in-the-browser", environment=reward))
    deployment = deployment_id(server, "train")
    offer(server, deployment, config)
    run_directory = RunDirectory(config.run_dir)
    # weights of version 4 cannot be written: the storage fails in the train stage of iteration 3
    obstacle = Path(run_directory.weights_dir(4))
    obstacle.parent.mkdir(parents=True)
    obstacle.touch()
    with server.worker(), prefect_ui.prefect_ui(browser, server.api) as ui:
        ui.open_form(deployment)
        picture(ui, "prefect-form")
        ui.fill_in("iterations", "200")
        ui.unfold("train")
        ui.choose("policy", "cispo")
        ui.field("policy").last.scroll_into_view_if_needed()
        picture(ui, "prefect-loss")
        run = submit(server, deployment, ui)
        given = settings_of(run)
        assert given.train.iterations == 200
        assert given.train.loss.policy == Cispo(high=0.28)

        ui.leave()
        server.await_state(run, "Failed", 300)
        before = bench.stacks.invariants.manifests(config)
        assert [stage for number, stage in before if number == 3] == ["filter", "rollout"]
        ui.open_run(run.id)
        ui.expect_state("Failed")
        # from a Dask worker
        expect(ui.page.get_by_text("reward raised ValueError: this one I do not score").first).to_be_visible()
        ui.open_artifact("report")
        expect(ui.page.get_by_text("3 of 200 iterations are through.")).to_be_visible()
        expect(ui.page.get_by_role("img", name="mean reward by iteration")).to_be_visible()
        expect(ui.page.get_by_role("img", name="what the devices did")).to_be_visible()
        expect(ui.page.get_by_role("link", name=run_directory.path("batches"))).to_be_visible()
        picture(ui, "prefect-report")

        obstacle.unlink()
        ui.page.go_back()
        ui.press("Retry")
        server.await_state(run, "Running")
        ui.leave()
        bench.waits.wait_until(
            lambda: bench.stacks.cluster.is_committed(config, 3, "publish"), "iteration 3", every_s=0.1
        )
        ui.open_run(run.id)
        ui.open_artifact("iterations")
        ui.await_rows(4, 60)
        picture(ui, "prefect-iterations")
        after = bench.stacks.invariants.manifests(config)
        assert {key: after[key] for key in before} == before
        assert after[3, "train"]["attempt"] == after[3, "publish"]["attempt"] == 2

        ui.page.go_back()
        ui.press("Cancel")
        bench.waits.wait_until(
            lambda: not engines(cluster, config) and not cluster.running_tasks(),
            "all device work to stop",
            quiet_s=STOPPED_S,
            every_s=0.5,
        )
        server.await_state(run, "Cancelled", 60)


def test_a_command_is_chosen_as_agent_in_the_form(server: prefect_server.Server, browser: Browser) -> None:
    deployment = deployment_id(server, "train")
    offer(server, deployment, RunConfig())
    with prefect_ui.prefect_ui(browser, server.api) as ui:
        ui.open_form(deployment)
        ui.choose("agent", "Command")
        words = ui.field("command").last
        for place, word in enumerate(("claude", "-p")):
            words.get_by_role("button", name="Add item").click()
            words.locator("input, textarea").nth(place).fill(word)
        picture(ui, "prefect-agent")
        run = submit(server, deployment, ui)
    # no worker takes it
    with server.client() as client:
        client.set_flow_run_state(run.id, Cancelled(), force=True)
    given = settings_of(run).environment.agent
    assert given == Command(command=("claude", "-p"))


def test_the_report_shows_what_policies_write_and_a_folded_setting_is_sent(
    server: prefect_server.Server, browser: Browser
) -> None:
    written = r"Spell (example: sun -> nus): | <b>*not* bold</b> &lt; \| `code` [link](http://evil.test)"
    deployment = deployment_id(server, "quickstart")
    table = f"| task |\n|---|\n| {show_text(written)} |\n"
    with server.client() as client:
        report = client.create_artifact(ArtifactCreate(key="probe", type="markdown", data=table))
    with prefect_ui.prefect_ui(browser, server.api) as ui:
        ui.open_artifact_page(report.id)
        expect(ui.rows.nth(1).get_by_role("cell")).to_have_text(written)
        ui.open_form(deployment)
        ui.unfold("rollout")
        ui.fill_in("group_size", "4")
        run = submit(server, deployment, ui)
    # no worker takes it
    with server.client() as client:
        client.set_flow_run_state(run.id, Cancelled(), force=True)
    given = settings_of(run)
    assert (given.rollout.group_size, given.rollout.max_tokens, given.train.iterations) == (4, 24, 40)


@pytest.mark.timeout(900)
# another choice is made in the form above; tests/flows/test_forms.py has the fields
@pytest.mark.nightly
def test_a_gate_and_a_curriculum_are_chosen_in_the_form(
    server: prefect_server.Server, cluster: bench.stacks.cluster.Cluster, browser: Browser
) -> None:
    parts = {"name": "tests.e2e.parts_package:Echoes", **dict.fromkeys(("tasks", "agent", "reward"))}
    rollout = {"success": {"part": "correct"}, "group_size": 4}
    config = prefect_server.without_addresses(
        cluster.config("chosen-in-the-form", environment=parts, rollout=rollout, train={"iterations": 2})
    )
    deployment = deployment_id(server, "train")
    offer(server, deployment, config)
    with server.worker() as worker, prefect_ui.prefect_ui(browser, server.api) as ui:
        ui.open_form(deployment)
        ui.unfold("rollout")
        ui.choose("gate", "mixed")
        ui.choose("curriculum", "Curriculum")
        ui.choose("pool", "int")
        ui.fill_in("pool", "20")
        ui.fill_in("solved", "0.5")
        ui.field("gate").scroll_into_view_if_needed()
        picture(ui, "prefect-curriculum")
        ui.field("stages").get_by_role("button", name="Add item").click()
        ui.fill_in("shares", '{"low": 1}')
        ui.field("stages").scroll_into_view_if_needed()
        picture(ui, "prefect-stages")
        run = submit(server, deployment, ui)
        given = settings_of(run).rollout
        assert (given.gate, given.success) == (Mixed(), Success(part="correct"))
        assert given.curriculum == Curriculum(pool=20, solved=0.5, stages=(Stage(shares={"low": 1}),))

        ui.leave()
        server.await_state(run, "Completed", 300, worker)
        rows = list(read_outcomes(RunDirectory(config.run_dir), config.train.iterations))
        sealed = [row for row in rows if row["verdict"] == "sealed"]
        assert len(sealed) == config.train.iterations * config.rollout.groups_per_batch
        right = [sum(score >= 1 for score in row["scores"]) for row in sealed]
        assert all(0 < number < config.rollout.group_size for number in right), "the gate let it pass"
        assert all((row["source"], row["task_index"] < 20) == ("low", True) for row in rows)
        ui.open_run(run.id)
        ui.open_artifact("iterations")
        expect(ui.rows.nth(1)).to_contain_text(re.compile(r"\d+/[1-9]\d*/\d+"))
        picture(ui, "prefect-groups")


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_the_quickstart_is_started_from_its_form_and_its_page_shows_that_it_learns(
    server: prefect_server.Server, browser: Browser
) -> None:
    deployment = deployment_id(server, "quickstart")
    with server.worker() as worker, prefect_ui.prefect_ui(browser, server.api) as ui:
        ui.open_form(deployment)
        ui.fill_in("iterations", "10")
        run = submit(server, deployment, ui)
        server.await_state(run, "Completed", 1200, worker)
        ui.open_run(run.id)
        ui.open_artifact("iterations")
        ui.await_rows(10, 60)
        first, last = (float(ui.rows.nth(row).get_by_role("cell").nth(1).inner_text()) for row in (10, 1))
        assert first < last
        ui.page.go_back()
        ui.open_artifact("report")
        expect(ui.page.get_by_text("10 of 10 iterations are through. Held-out reward")).to_be_visible()
