"""What the client of README's agent costs. Baseline in the same run: a new `AsyncOpenAI` in each session,
which reads all certificate authorities from a file.

`sessions`: CPU time of the agents' process per session of README's agent, at a model that answers at once; 64
sessions at a time. Each way has a process of its own. `own_file` opens a client in each session, and
SSL_CERT_FILE names a file of the user. `own_folder` is the same agent, but the file is that of the system:
the process then reads the system's folder (docs/decisions/065). `shared` is `endpoint.client()` in the same
environment.

`runs`: README's example as it is trained, the three ways one after the other, each with its own stack: tokens
per second, and CPU time of the agents' worker per session with claims, reports and the reward function. It
means something only on a machine with nothing else.

Predicted before the first run, from 23.6, 2.9 and 1.2 ms per session in a prototype: see PREDICTED.

    python -m benchmarks.agent_clients --only sessions
    python -m benchmarks.agent_clients --only runs
"""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import certifi
import typer

from benchmarks.orchestration import run_flow
from sf_core.agents.authorities import equal_folder
from sf_core.cli.stack.local import local_stack, start_services
from sf_core.config import RunConfig
from sf_core.config.yaml_file import load_config
from sf_core.reports.view import RunView
from storage.run_directory import RunDirectory

ROOT = Path(__file__).parents[1]
SHARED = "endpoint.client()"
OWN = "AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)"
BUNDLES = (ssl.get_default_verify_paths().openssl_cafile, "/etc/ssl/certs/ca-certificates.crt")

Part = Literal["sessions", "runs"]

PREDICTED: dict[Part, dict[str, dict[str, float]]] = {
    "sessions": {
        "own_file": {"cpu_ms_per_session": 24.0},
        "own_folder": {"cpu_ms_per_session": 3.0},
        "shared": {"cpu_ms_per_session": 1.3},
    },
    "runs": {
        "own_file": {"cpu_ms_per_session": 27.0, "tokens_per_second": 180},
        "own_folder": {"cpu_ms_per_session": 6.0, "tokens_per_second": 900},
        "shared": {"cpu_ms_per_session": 4.0, "tokens_per_second": 1000},
    },
}


def main(only: Annotated[Part, typer.Option()], iterations: int = 8, number: int = 512) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code, settings = (
        re.search(rf"```{language}\n(.*?)```", readme, re.DOTALL)[1]  # type: ignore[index]
        for language in ("python", "yaml")
    )
    if SHARED not in code:
        raise SystemExit(f"README's agent does not use {SHARED}")
    own = "from openai import AsyncOpenAI\n" + code.replace(SHARED, OWN)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bundle = find_bundle()
        users = folder / "authorities.pem"
        # one fewer than the system has
        users.write_text(
            Path(bundle).read_text(encoding="utf-8").partition("-----END CERTIFICATE-----\n")[2],
            encoding="utf-8",
        )
        measured: dict[str, Any] = {"predicted": PREDICTED[only]}
        for name, agent, file in (
            ("own_file", own, str(users)),
            ("own_folder", own, bundle),
            ("shared", code, bundle),
        ):
            (place := folder / name).mkdir()
            (place / "speller.py").write_text(agent, encoding="utf-8")
            (place / "my.yaml").write_text(settings, encoding="utf-8")
            if only == "sessions":
                measured[name] = {"cpu_ms_per_session": sessions(place, file, number)}
            else:
                measured[name] = run(place, iterations, file)
    print(json.dumps(measured))


def sessions(place: Path, authorities: str, number: int) -> float:
    """CPU time in ms per session, of a process of its own."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{place}", "SSL_CERT_FILE": authorities, "SSL_CERT_DIR": ""}
    with answering_at_once() as url:
        command = [sys.executable, "-m", "benchmarks.agent_sessions", url, str(number)]
        return float(subprocess.check_output(command, env=env, text=True, encoding="utf-8"))


@contextmanager
def answering_at_once() -> Iterator[str]:
    """URL of a model that answers at once, in another process than the agents."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "benchmarks.agent_sessions", str(port)])
    try:
        for _ in range(600):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait()


def find_bundle() -> str:
    """A file with the certificates of the system's folder. Raises SystemExit without one."""
    paths = ssl.get_default_verify_paths()
    for file in BUNDLES:
        if equal_folder({"SSL_CERT_FILE": file}, paths, certifi.where()):
            return file
    raise SystemExit(f"none of {BUNDLES} has the certificates of {paths.openssl_capath}")


def run(place: Path, iterations: int, authorities: str) -> dict[str, Any]:
    env = {
        "PREFECT_HOME": str(place / "prefect"),
        "PYTHONPATH": f"{ROOT}:{place}",
        "SF_CACHE_DIR": str(place.parent / "cache"),
        "SSL_CERT_FILE": authorities,
        "SSL_CERT_DIR": "",
    }
    with local_stack(place / "logs", env) as stack:
        services = start_services(stack, place, RunConfig().cluster.workers)()
        places = {
            "run_id": place.name,
            "train.iterations": iterations,
            "evaluate.every": 1000,
            "cluster.scheduler": services.scheduler,
            "dataplane.url": services.dataplane,
            "storage.root": place,
        }
        changes = [f"{setting}={value}" for setting, value in places.items()]
        config = load_config(str(place / "my.yaml"), changes)
        run_flow(config, place, {**stack.env, **services.addresses})
    return figures(RunDirectory(config.run_dir))


def figures(directory: RunDirectory) -> dict[str, Any]:
    summary = json.loads(Path(directory.path("summary.json")).read_text(encoding="utf-8"))
    spent = RunView(directory).runners.values()
    sessions = sum(one["sessions"] for one in spent)
    return {
        "sessions": sessions,
        "cpu_ms_per_session": round(1000 * sum(one["cpu_s"] for one in spent) / sessions, 2),
        "tokens_per_second": summary["tokens_per_second"],
        "idle": summary["idle_fraction"],
        "waits_for_agents": any(SHARED in concern for concern in summary["concerns"]),
    }


if __name__ == "__main__":
    typer.run(main)
