"""Arguments of `sf` that it must refuse before it starts anything."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.bench.commands import check_refused

# what is not refused might go on for ever
pytestmark = pytest.mark.timeout(60)

ARGUMENTS: list[tuple[str, str]] = [
    ("trian", "trian"),
    ("train", "CONFIG"),
    ("train nowhere.yaml", "nowhere.yaml"),
    ("train run.yaml --iterations 3", "--iterations"),
    ("evaluate nowhere", "nowhere"),
    ("evaluate run.yaml", "run.yaml"),
    ("resume nowhere", "nowhere"),
    ("resume nosuch://x", "nosuch://x"),
    ("inspect nowhere", "nowhere"),
    ("inspect nosuch://x", "nosuch://x"),
    ("inspect run.yaml", "run.yaml"),
    ("report nowhere", "nowhere"),
    ("report nowhere --max-mb much", "--max-mb"),
    ("report nowhere elsewhere", "nowhere"),
    ("report nowhere -o missing/page.html", "missing"),
    ("export nowhere missing/out.jsonl --to trl", "missing"),
    ("settings train.lerning_rate", "train.learning_rate"),
    ("settings train --schema", "--schema"),
    ("export nowhere out.jsonl --to trl", "nowhere"),
    ("export nowhere out.jsonl --to csv", "csv"),
    ("export nowhere out.jsonl", "--to"),
    ("replay nowhere --iteration 0", "nowhere"),
    ("replay nowhere --iteration x", "--iteration"),
    ("replay nowhere --iteration -1", "--iteration"),
    ("ls nowhere", "nowhere"),
    ("gc nowhere", "nowhere"),
    ("gc nowhere --keep-checkpoints 0", "--keep-checkpoints"),
    ("plan run.yaml --scheduler nonsense", "nonsense"),
    ("worker --tags rollout", "--scheduler"),
    ("worker --scheduler tcp://127.0.0.1:1 --tags rollout --device tpu", "--device"),
    ("worker --scheduler tcp://127.0.0.1:1 --tags rollout --device-kind k80", "--device-kind"),
    ("worker --scheduler tcp://127.0.0.1:1 --tags rollout --threads 0", "--threads"),
    ("worker --scheduler tcp://127.0.0.1:1 --tags a/b", "--tags"),
    ("worker --scheduler tcp://127.0.0.1:1 --tags rollout --host 0.0.0.0", "0.0.0.0"),
    ("worker --scheduler nonsense --tags rollout", "nonsense"),
    ("dataplane --port http", "--port"),
    ("dataplane --port 99999", "--port"),
    ("dataplane --host 0.0.0.0", "SF_DATAPLANE_KEY"),
    ("dataplane --host no.such.host.invalid", "no.such.host.invalid"),
    ("dataplane --fsync never", "--fsync"),
    ("dataplane --gateways 2", "a data plane is one process; for more load start several data planes"),
    ("dataplane --journal-dir run.yaml", "run.yaml"),
    ("dataplane --memory-mb -1", "--memory-mb"),
    ("dataplane --grace-s -1", "--grace-s"),
    ("dataplane --max-connections 0", "--max-connections must be at least 1, got 0"),
    ("dataplane --max-connections 2000000", "raise that limit with `ulimit -n`, or choose fewer connections"),
    ("dataplane --request-timeout-s 0", "--request-timeout-s must be more than 0, got 0"),
    ("dataplane --request-timeout-s nan", "--request-timeout-s must be more than 0, got nan"),
    ("up nowhere.yaml", "nowhere.yaml"),
    ("up --prefect-port 0", "--prefect-port"),
    ("up --dataplane-port 99999", "--dataplane-port"),
    ("setup-server", "PREFECT_API_URL"),
    ("setup-server --retries -1", "--retries"),
    ("setup-server --silence-s 1", "--silence-s"),
]


@pytest.mark.parametrize(("arguments", "name"), ARGUMENTS)
def test_a_wrong_argument_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("PREFECT_API_URL", "SF_DATAPLANE_KEY"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "run.yaml").write_text("", encoding="utf-8")
    check_refused(tmp_path, arguments.split(), name)


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
def test_a_port_in_use_is_named_with_the_option_that_sets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = check_refused(tmp_path, [*arguments.split(), str(port)])
    assert said == (
        f"port {port} of 127.0.0.1 is in use; end the process that listens there, or choose another "
        f"{arguments.split()[-1]}\n"
    )


@pytest.mark.parametrize(
    ("host", "sentence"),
    [
        ("192.0.2.1", "is no address of this machine; choose another --host"),
        ("no.such.host.invalid", "cannot be used"),
    ],
)
def test_an_address_of_another_machine_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = check_refused(tmp_path, ["serve", "mine", "--host", host, "--key", "12345678"])
    assert said.startswith(f"port 8800 of {host} {sentence}")
