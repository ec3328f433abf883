"""deploy/kubernetes: manifests match Kubernetes' schema, each other, and the image."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.bench import ROOT
from tests.deploy import commands

VERSION = "1.37.0"
MANIFESTS: list[dict[str, Any]] = [
    manifest
    for file in sorted((commands.DEPLOY / "kubernetes").glob("*.yaml"))
    for manifest in yaml.safe_load_all(file.read_text(encoding="utf-8"))
]
WORKLOADS = [manifest for manifest in MANIFESTS if manifest["kind"] in ("Deployment", "StatefulSet")]
CONFIG: dict[str, str] = next(m for m in MANIFESTS if m["kind"] == "ConfigMap")["data"]


def name_of(manifest: dict[str, Any]) -> str:
    return f"{manifest['kind']}-{manifest['metadata']['name']}"


def containers(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    pod = manifest["spec"]["template"]["spec"]
    yield from pod.get("initContainers", [])
    yield from pod["containers"]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=name_of)
def test_a_manifest_fits_the_schema(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)
    assert manifest["kind"] == "Namespace" or manifest["metadata"]["namespace"] == "seamlessflow"


@pytest.mark.parametrize("manifest", WORKLOADS, ids=name_of)
def test_a_container_calls_commands_and_options_that_exist(manifest: dict[str, Any]) -> None:
    for container in containers(manifest):
        own = {entry["name"]: "10.0.0.1" for entry in container.get("env", [])}
        commands.check_command(container["command"], CONFIG | own)


@pytest.mark.parametrize("manifest", WORKLOADS, ids=name_of)
def test_a_pod_mounts_what_it_defines_and_runs_without_rights(manifest: dict[str, Any]) -> None:
    pod = manifest["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    claims = manifest["spec"].get("volumeClaimTemplates", [])
    volumes = {volume["name"] for volume in pod["volumes"]} | {claim["metadata"]["name"] for claim in claims}
    mounted = set()
    for container in containers(manifest):
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]
        mounted |= {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == volumes


def test_services_and_addresses_name_pods_that_listen() -> None:
    listening = {}
    for workload in WORKLOADS:
        for container in containers(workload):
            for port in container.get("ports", []):
                listening[workload["metadata"]["name"]] = port["containerPort"]
    services = {
        service["spec"]["selector"]["app"]: service["spec"]["ports"][0]["port"]
        for service in MANIFESTS
        if service["kind"] == "Service"
    }
    assert services == listening == {"server": 4200, "scheduler": 8786, "dataplane": 8700}
    for variable, service in (
        ("PREFECT_API_URL", "server"),
        ("SF_SCHEDULER", "scheduler"),
        ("SF_DATAPLANE_URL", "dataplane"),
    ):
        assert f"//{service}:{services[service]}" in CONFIG[variable]


def test_no_manifest_holds_a_secret_and_the_config_sets_nothing_that_nobody_reads() -> None:
    assert all(manifest["kind"] != "Secret" for manifest in MANIFESTS)
    assert not any(("KEY" in name and "TLS" not in name) or "AUTH" in name for name in CONFIG)
    commands.check_variables(CONFIG, str(WORKLOADS))


def test_the_image_copies_what_is_there() -> None:
    for line in (commands.DEPLOY / "Dockerfile").read_text(encoding="utf-8").splitlines():
        if line.startswith("COPY "):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
