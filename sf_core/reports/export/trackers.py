"""A run's metrics in TensorBoard, and in MLflow and Weights & Biases if its configuration asks for that.

For TensorBoard, each file of metrics becomes an event file, written atomically. The other trackers are
servers: a thread of its own sends the metrics, so that a slow or missing server delays nothing. A file in the
run directory says which metrics were sent, so that a resumed run sends the rest.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from sf_core.config import RunConfig
from sf_core.config.validation import ConfigError
from storage import files
from storage.json_files import load_json
from storage.run_directory import RunDirectory
from storage.tables.metrics import KINDS, Kind, Point, newer_points

log = logging.getLogger(__name__)

EVENTS_VERSION = "brain.Event:2"
"""Version that TensorBoard expects in the first record of a file."""

PATIENCE_S = 60.0
"""How long the end of a run waits for metrics still to be sent."""

End = Literal["finished", "failed", "interrupted"]
"""How an attempt on a run ended."""


def write_events(run: RunDirectory, newest: int) -> None:
    """Write the event files still missing for iterations up to `newest` and evaluations of their policies.

    Never raises, because the run matters more than its curves. A failure is one line of the log, and the next
    call writes what is missing."""
    try:
        for kind in KINDS:
            _write_events_of(run, kind, newest)
    except Exception as error:  # the next call writes what is missing
        log.warning("run %s: metrics are not written for TensorBoard: %s", run.run_id, error)


def _write_events_of(run: RunDirectory, kind: Kind, newest: int) -> None:
    written = files.list_files(run.path("tensorboard", kind))
    # TensorBoard reads the files of a folder in the order of their names, and never one before the last
    last = int(written[-1].rsplit(".", 1)[-1]) if written else -1
    for number, points in newer_points(run, kind, last, newest):
        files.write_atomic(run.events_file(kind, number), encode_events(points))


def encode_events(points: Sequence[Point]) -> bytes:
    """Bytes of an event file with these points as TensorBoard scalars."""
    # their import takes 0.2 s, which a command that only reads a run need not wait for
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    data = io.BytesIO()
    now = time.time()
    writer = RecordWriter(data)
    writer.write(Event(wall_time=now, file_version=EVENTS_VERSION).SerializeToString())
    for step, scalars in points:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        writer.write(Event(wall_time=now, step=step, summary=Summary(value=values)).SerializeToString())
    return data.getvalue()


class Trackers:
    """The trackers of one run, as a context that sends the rest on exit. What a tracker does not accept is
    one line of the log, and is sent again with the next call.

    Raises ConfigError, one sentence, if a tracker's package is not installed."""

    def __init__(self, run: RunDirectory, config: RunConfig) -> None:
        chosen = {name: getattr(config.track, name) for name in _MAKE}
        for name in (name for name in chosen if chosen[name] and importlib.util.find_spec(name) is None):
            raise ConfigError(
                f"track.{name} is set, but {name} is not installed; "
                "it comes with the extra [trackers] of seamlessflow"
            )
        self._senders = [_Sender(run, config, name) for name in chosen if chosen[name]]
        self._last = config.train.iterations - 1
        self._end: End = "finished"
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name="trackers", daemon=True)

    def __enter__(self) -> Trackers:
        if self._senders:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._senders:
            return
        if kind is not None:
            # interruptions of a flow do not derive from Exception
            self._end = "failed" if issubclass(kind, Exception) else "interrupted"
        self.send(self._last)
        self._queue.put(None)
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            log.warning("trackers did not accept the last metrics within %.0f s", PATIENCE_S)

    def send(self, newest: int) -> None:
        """Queue the metrics of iterations up to `newest` and evaluations of their policies. Does not wait."""
        self._queue.put(newest)

    def _send_all(self) -> None:
        while (newest := self._queue.get()) is not None:
            for sender in self._senders:
                sender.send(newest)
        for sender in self._senders:
            sender.close(self._end)


class _Tracker(Protocol):
    """One run in a tracker, which shows it as running until `close`."""

    run_id: str
    """Id of the run in the tracker."""

    def send(self, kind: Kind, points: list[Point]) -> None: ...

    def close(self, end: End) -> None: ...


class _Sender:
    """Sends one tracker what it has not been sent yet."""

    def __init__(self, run: RunDirectory, config: RunConfig, name: str) -> None:
        self._run = run
        self._config = config
        self._name = name
        self._tracker: _Tracker | None = None

    def send(self, newest: int) -> None:
        with self._log_failure("its metrics"):
            progress = self._read_progress()
            for kind in KINDS:
                for number, points in newer_points(self._run, kind, progress["sent"].get(kind, -1), newest):
                    self._tracker_run(progress).send(kind, points)
                    progress["sent"][kind] = number
                    self._write_progress(progress)

    def close(self, end: End) -> None:
        with self._log_failure("how it ended"):
            progress = self._read_progress()
            # even if this attempt sent nothing: an earlier one may have ended in another state
            if "run_id" in progress:
                self._tracker_run(progress).close(end)

    @contextmanager
    def _log_failure(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the run matters more than its curves
            log.warning("run %s: %s did not accept %s: %s", self._run.run_id, self._name, what, error)

    def _tracker_run(self, progress: dict[str, Any]) -> _Tracker:
        """The run in the tracker; its id is noted at once, even if the tracker then accepts nothing."""
        if self._tracker is None:
            self._tracker = _MAKE[self._name](self._config, progress.get("run_id"))
            progress["run_id"] = self._tracker.run_id
            self._write_progress(progress)
        return self._tracker

    @property
    def _progress_uri(self) -> str:
        return self._run.path("trackers", f"{self._name}.json")

    def _read_progress(self) -> dict[str, Any]:
        if not files.exists(self._progress_uri):
            return {"sent": {}}
        return dict(load_json(files.read_bytes(self._progress_uri)))

    def _write_progress(self, progress: dict[str, Any]) -> None:
        files.write_atomic(self._progress_uri, json.dumps(progress).encode())


class MlflowRun:
    def __init__(self, config: RunConfig, known: str | None) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        self.run_id = known or self._create(config)
        if known is not None:
            self._client.update_run(known, "RUNNING")
        # MLflow parameters cannot be changed once set
        known_params = self._client.get_run(known).data.params if known is not None else {}
        self._settings = [
            Param(name, value[:MLFLOW_PARAM_CHARS])
            for name, value in flatten(config.model_dump())
            if name not in known_params
        ]
        """Parameters not sent yet."""

    def _create(self, config: RunConfig) -> str:
        name = str(config.track.mlflow)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        run = self._client.create_run(experiment_id, run_name=config.run_id)
        return str(run.info.run_id)

    def send(self, kind: Kind, points: list[Point]) -> None:
        from mlflow.entities import Metric

        while self._settings:
            self._client.log_batch(self.run_id, params=self._settings[:MLFLOW_BATCH])
            del self._settings[:MLFLOW_BATCH]
        now_ms = int(time.time() * 1000)
        for step, values in points:
            metrics = [Metric(f"{kind}/{name}", value, now_ms, step) for name, value in values.items()]
            self._client.log_batch(self.run_id, metrics=metrics)

    def close(self, end: End) -> None:
        self._client.set_terminated(self.run_id, MLFLOW_STATES[end])


class WandbRun:
    def __init__(self, config: RunConfig, known: str | None) -> None:
        import wandb

        # random: the run may have been begun anew, or another may have its name; at most 128 characters
        self.run_id = known or f"{config.run_id}-{secrets.token_hex(4)}"
        self._run = wandb.init(
            project=config.track.wandb,
            id=self.run_id,
            # an existing run may have been renamed there
            name=None if known else config.run_id,
            resume="allow",
            config=config.model_dump(),
            # metrics only: no console output, machine statistics or code
            settings=wandb.Settings(
                console="off", x_disable_stats=True, disable_git=True, disable_code=True, silent=True
            ),
        )
        for kind in KINDS:
            # W&B's own step counts rows, of which there are several per iteration
            self._run.define_metric(f"{kind}/step", hidden=True)
            self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")

    def send(self, kind: Kind, points: list[Point]) -> None:
        for step, values in points:
            self._run.log(
                {f"{kind}/{name}": value for name, value in values.items()} | {f"{kind}/step": step}
            )

    def close(self, end: End) -> None:
        self._run.finish(exit_code=0 if end == "finished" else 1)


MLFLOW_BATCH = 100
"""Number of parameters that MLflow accepts at once."""

MLFLOW_PARAM_CHARS = 6000

MLFLOW_STATES: dict[End, str] = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}

_MAKE: dict[str, Callable[[RunConfig, str | None], _Tracker]] = {"mlflow": MlflowRun, "wandb": WandbRun}


def flatten(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)
