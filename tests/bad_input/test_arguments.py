"""Arguments of `sf` that it must refuse before it starts anything."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sf_core.config.yaml_file import builtin_configs
from tests.bench.commands import check_refused
from tests.bench.refusals import Refusal, refuses

# what is not refused might go on for ever
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a configuration."""
    monkeypatch.chdir(tmp_path)
    for variable in ("PREFECT_API_URL", "PREFECT_SERVER_API_AUTH_STRING", "SF_DATAPLANE_KEY"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "run.yaml").write_text("", encoding="utf-8")
    return tmp_path


@refuses("""
    trian
    ---
    trian x
    > there is no command 'trian'; did you mean train?
    inspekt x
    > there is no command 'inspekt'; did you mean inspect?
    colour x
    > there is no command 'colour'; `sf --help` lists the commands
    evaluate nowhere
    ---
    resume nowhere
    ---
    inspect nowhere
    ---
    report nowhere
    ---
    report nowhere elsewhere
    ---
    export nowhere out.jsonl --to trl
    ---
    replay nowhere --iteration 0
    ---
    gc nowhere
    > runs/nowhere: no run here (config.json is missing); {here}/runs has no runs
    ls nowhere
    > nowhere: no run here (config.json is missing); {here} has no runs
    ls .
    ---
    gc .
    > .: no runs here (no folders with a config.json); name a run or its storage.root
    evaluate run.yaml
    ---
    inspect run.yaml
    > run.yaml is a configuration, not a run; {here}/runs has no runs
    resume nosuch://x
    ---
    inspect nosuch://x
    ---
    ls nosuch://x
    ---
    gc nosuch://x
    > nosuch://x: fsspec does not know this kind of storage: Protocol not known: nosuch
    report nowhere -o missing/page.html
    > missing does not exist: create this folder first, or name another file than missing/page.html
    export nowhere missing/out.jsonl --to trl
    > missing does not exist: create this folder first, or name another file than missing/out.jsonl
    export nowhere out.jsonl --to csv
    > unknown format csv; use one of trl, verl, sharegpt, atif, parquet
    settings train.lerning_rate
    > train.lerning_rate: unknown setting; did you mean train.learning_rate or train.critic.learning_rate or
    > train.weights?
    settings train --schema
    > --schema describes all settings: leave train out
    plan run.yaml --scheduler nonsense
    ---
    worker --scheduler nonsense --tags rollout
    > no Dask scheduler answers at nonsense: missing port number in address 'nonsense'
    worker --scheduler tcp://127.0.0.1:1 --tags rollout --device tpu
    > --device: expected cpu or cuda:N, got 'tpu'
    worker --scheduler tcp://127.0.0.1:1 --tags rollout --device-kind k80
    > --device-kind: unknown device kind 'k80'; use one of a100, b200, h100, h20, h200, h800, l4, l40s,
    > mi300x, or measure the device with sf worker --probe
    worker --scheduler tcp://127.0.0.1:1 --tags rollout --threads 0
    > --threads: input should be greater than or equal to 1, got 0
    worker --scheduler tcp://127.0.0.1:1 --tags a/b
    > --tags: 'a/b' is not a valid tag or name: use letters, digits, '.', '_' and '-'
    worker --scheduler tcp://127.0.0.1:1 --tags rollout --host 0.0.0.0
    > other machines can reach 0.0.0.0, and Dask executes whatever code it receives: set Dask's
    > distributed.comm.tls.ca-file and distributed.comm.tls.worker.cert, or bind to 127.0.0.1
    worker --scheduler tls://192.0.2.1:8786 --tags cpu
    > tls://192.0.2.1:8786 cannot be reached without certificates: set Dask's distributed.comm.tls.ca-file
    > and distributed.comm.tls.client.cert
    scheduler --host 0.0.0.0
    > other machines can reach 0.0.0.0, and Dask executes whatever code it receives: set Dask's
    > distributed.comm.tls.ca-file and distributed.comm.tls.scheduler.cert, or bind to 127.0.0.1
    server --host 0.0.0.0
    > other machines can reach 0.0.0.0: set PREFECT_SERVER_API_AUTH_STRING to USER:PASSWORD, or serve on
    > 127.0.0.1
    dataplane --host 0.0.0.0
    > other machines can reach 0.0.0.0: set SF_DATAPLANE_KEY, or serve on 127.0.0.1
    dataplane --host no.such.host.invalid
    > other machines can reach no.such.host.invalid: set SF_DATAPLANE_KEY, or serve on 127.0.0.1
    dataplane --gateways 2
    > --gateways 2 is not supported: a data plane is one process; for more load start several data planes
    > with different --port, and give each run the URL of one data plane (--set
    > dataplane.url=http://HOST:PORT)
    dataplane --journal-dir run.yaml
    > --journal-dir run.yaml cannot be written (File exists): name another folder
    dataplane --memory-mb -1
    > --memory-mb must be more than 0, got -1
    dataplane --max-connections 0
    > --max-connections must be at least 1, got 0
    dataplane --request-timeout-s 0
    > --request-timeout-s must be more than 0, got 0
    dataplane --request-timeout-s nan
    > --request-timeout-s must be more than 0, got nan
    setup-server
    > PREFECT_API_URL is not set: set it to the Prefect server, for example http://127.0.0.1:4200/api
    serve mine --host 192.0.2.1 --key 12345678
    > port 8800 of 192.0.2.1 is no address of this machine; choose another --host
    serve mine --host no.such.host.invalid --key 12345678
    > port 8800 of no.such.host.invalid cannot be used, because no host has this name; choose another --host
""")
def test_a_wrong_argument_is_refused(here: Path, refusal: Refusal) -> None:
    [arguments] = refusal.given
    assert check_refused(here, arguments.split()).strip() == refusal.sentence.format(here=here)


@pytest.mark.parametrize("command", ["train", "plan", "up", "try"])
@pytest.mark.parametrize(("name", "meant"), [("ran.yaml", "run.yaml"), ("quikstart", "quickstart")])
def test_a_configuration_that_does_not_exist_is_refused_with_those_that_do(
    here: Path, command: str, name: str, meant: str
) -> None:
    told = "no such file; give the path of a YAML file or the name of a built-in configuration"
    said = f"{name}: {told}: {', '.join(builtin_configs())}; did you mean {meant}?\n"
    assert check_refused(here, [command, name]) == said


def test_more_connections_than_this_process_may_open_are_refused(here: Path) -> None:
    said = check_refused(here, ["dataplane", "--max-connections", "2000000"])
    assert said.startswith("--max-connections 2000000 needs 2000064 open files, but this process may open ")
    assert said.endswith(": raise that limit with `ulimit -n`, or choose fewer connections\n")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("train", "CONFIG"),
        ("train run.yaml --iterations 3", "--iterations"),
        ("report nowhere --max-mb much", "--max-mb"),
        ("export nowhere out.jsonl", "--to"),
        ("replay nowhere --iteration x", "--iteration"),
        ("replay nowhere --iteration -1", "--iteration"),
        ("gc nowhere --keep-checkpoints 0", "--keep-checkpoints"),
        ("gc nowhere --keep-weights 0", "--keep-weights"),
        ("worker --tags rollout", "--scheduler"),
        ("dataplane --port http", "--port"),
        ("dataplane --port 99999", "--port"),
        ("dataplane --fsync never", "--fsync"),
        ("dataplane --grace-s -1", "--grace-s"),
        ("up --prefect-port 0", "--prefect-port"),
        ("up --dataplane-port 99999", "--dataplane-port"),
        ("setup-server --retries -1", "--retries"),
        ("setup-server --silence-s 1", "--silence-s"),
    ],
)
def test_what_typer_refuses_is_named(here: Path, arguments: str, name: str) -> None:
    check_refused(here, arguments.split(), name)


@pytest.mark.parametrize(
    "arguments",
    [
        "serve mine --port",
        "dataplane --port",
        "server --port",
        "scheduler --port",
        "up --prefect-port",
        "up --scheduler-port",
        "up --dataplane-port",
    ],
)
def test_a_port_in_use_is_named_with_the_option_that_sets_it(here: Path, arguments: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = check_refused(here, [*arguments.split(), str(port)])
    assert said == (
        f"port {port} of 127.0.0.1 is in use; end the process that listens there, or choose another "
        f"{arguments.split()[-1]}\n"
    )
