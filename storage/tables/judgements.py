"""Judgements as Parquet: one row per question that a reward function asked a judge, and per number that it
noted, of the sessions that a rollout or an evaluation tells of.

Owns the columns. What they mean is in docs/reference/trajectories.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
import pyarrow as pa

from storage.files import FileRef
from storage.manifests import Manifest
from storage.run_directory import RunDirectory
from storage.tables import parquet


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What a judge was asked and said, or what a reward function noted."""

    judge: str | None = None
    """Name of the judge; None: a number that the reward function noted."""
    item: str = ""
    """What was judged, in the words of the reward function."""
    pair: int | None = None
    """The two questions of a comparison in both orders have the same number, which is drawn at random."""
    messages: str | None = None
    """The question, as JSON of OpenAI's `messages`; None: those of the answer were too long."""
    reply: str | None = None
    """The reply as text, without reasoning; None: no reply came that counts."""
    verdict: str | None = None
    """What was read of the reply, as JSON; None: it could not be read."""
    tokens: int = 0
    """Tokens of question and reply, of all attempts."""
    seconds: float = 0.0
    """Time until the reply, with all attempts."""
    attempts: int = 0
    """Number of calls; 0: none, because the reply was known."""
    cached: bool = False
    """The reply was known from an equal question."""
    discarded: list[str] = []
    """Why replies did not count, one reason for each of them; the question was asked again."""


SCHEMA = pa.schema(
    {name: pa.string() for name in ("run_id", "session_id", "judge", "item")}
    | {"pair": pa.int32(), "messages": pa.string(), "reply": pa.string(), "verdict": pa.string()}
    | {"tokens": pa.int64(), "seconds": pa.float64(), "attempts": pa.int32(), "cached": pa.bool_()}
    | {"discarded": pa.list_(pa.string())}
)


def write_judgements(
    run: RunDirectory,
    iteration: int,
    judged: Iterable[tuple[str, Judgement]],
    part: str,
    kind: Literal["trajectories", "evaluations"] = "trajectories",
) -> FileRef:
    """Write the judgements of sessions, each with the session's id, of an iteration, or of the evaluation of
    a version. Equal rows give equal bytes under the same name. Raises OSError if the storage fails."""
    # no two manifests may name files of one folder, and readers take a folder within another for its rows
    folder = "judgements" if kind == "trajectories" else "evaluation_judgements"
    rows = [
        {"run_id": run.run_id, "session_id": session_id, **msgspec.structs.asdict(judgement)}
        for session_id, judgement in judged
    ]
    uri = f"{run.partition(folder, iteration)}/{part}.parquet"
    return run.relative(parquet.write_table(uri, pa.Table.from_pylist(rows, schema=SCHEMA)))


def read_judgements(run: RunDirectory, manifest: Manifest) -> pa.Table:
    """Judgements that the manifest of a rollout or an evaluation names, in the columns of SCHEMA; no rows if
    it names none. Raises ValueError if a file is missing or broken."""
    # older manifests of evaluations name files in judgements/evaluations
    refs = [*manifest.files("judgements"), *manifest.files("evaluation_judgements")]
    tables = [read_file(run.path(ref.uri)) for ref in refs]
    return pa.concat_tables(tables) if tables else SCHEMA.empty_table()


def read_file(uri: str) -> pa.Table:
    """The judgements in a file, in the columns of SCHEMA; earlier files have no `discarded`. Raises
    ValueError if the file is missing or broken."""
    table = parquet.read_table(uri, SCHEMA.names, SCHEMA, optional=["discarded"])
    if "discarded" not in table.column_names:
        none = pa.array([[]] * len(table), SCHEMA.field("discarded").type)
        table = table.append_column("discarded", none)
    return table.select(SCHEMA.names)
