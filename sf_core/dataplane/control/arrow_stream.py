"""The trajectories of a batch as an Arrow IPC stream, for trainers outside this project.

Owns which files a batch consists of, and sends them in small record batches so that memory does not grow with
the batch. Which groups a batch holds is decided in runs/decide.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from io import BytesIO

import pyarrow as pa

from sf_core.dataplane.runs.run import ServedRun
from sf_core.dataplane.runs.sealing import Sealer
from storage.run_directory import RunDirectory
from storage.tables.parquet import METADATA
from storage.tables.schema import MULTIMODAL_SCHEMA, SCHEMA
from storage.tables.trajectories import iter_trajectories

MEDIA_TYPE = "application/vnd.apache.arrow.stream"

MAX_ROWS = 16
"""Most rows of a record batch, which bound memory: the longest trajectories take half a megabyte each."""


async def batch_files(run: ServedRun, sealer: Sealer, index: int, wait_s: float) -> list[str]:
    """URIs of the batch's files. A batch that is ready, or gets so within `wait_s`, is sealed if it was not.

    Raises ApiError 409 if it is not ready."""
    directory = RunDirectory(run.spec.run_dir)
    committed = await asyncio.to_thread(directory.read_manifest, index, "rollout")
    if committed is not None:
        return [directory.path(ref.uri) for ref in committed.files("trajectories")]
    await run.changed.until(lambda: run.readiness(index).ready, wait_s)
    sealed = await sealer.seal_batch(index, run.spec.attempt)
    return [directory.path(file["uri"]) for file in sealed["files"]]


def arrow_stream(uris: Iterable[str], *, is_multimodal: bool = False) -> Iterator[bytes]:
    """The rows of these files in the columns of storage.tables.schema. Blocks while it reads.
    `is_multimodal`: the policy is shown images, and the files have their column."""
    sink = BytesIO()
    # closed only after the last row: a reader of a stream that breaks off must notice
    schema = MULTIMODAL_SCHEMA if is_multimodal else SCHEMA
    writer = pa.ipc.new_stream(sink, schema.with_metadata(METADATA))
    for uri in uris:
        for batch in iter_trajectories(uri, MAX_ROWS):
            writer.write_batch(batch)
            yield _drain(sink)
    writer.close()
    yield _drain(sink)


def _drain(sink: BytesIO) -> bytes:
    data = sink.getvalue()
    sink.seek(0)
    sink.truncate()
    return data
