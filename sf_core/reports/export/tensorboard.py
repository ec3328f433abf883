"""A run's metrics for TensorBoard: one event file for each file of metrics, written atomically."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Sequence

from storage import files
from storage.run_directory import RunDirectory
from storage.tables.metrics import KINDS, Kind, Point, newer_points

log = logging.getLogger(__name__)

FORMAT = "brain.Event:2"
"""Version that TensorBoard expects in the first record of a file."""


def write_events(run: RunDirectory, newest: int) -> None:
    """Write the event files still missing for iterations up to `newest` and evaluations of their policies.

    Never raises, because the run matters more than its curves. A failure is one line of the log, and the next
    call writes what is missing."""
    try:
        for kind in KINDS:
            _write_kind(run, kind, newest)
    except Exception as error:  # the next call writes what is missing
        log.warning("run %s: metrics are not written for TensorBoard: %s", run.run_id, error)


def _write_kind(run: RunDirectory, kind: Kind, newest: int) -> None:
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
    writer.write(Event(wall_time=now, file_version=FORMAT).SerializeToString())
    for step, scalars in points:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        writer.write(Event(wall_time=now, step=step, summary=Summary(value=values)).SerializeToString())
    return data.getvalue()
