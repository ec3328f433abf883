"""The public reader of a run: each method reads the committed files and returns a table."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from sf_core.reports.iterations import failures_of, stage_time
from sf_core.reports.sessions import (
    GROUPS,
    SESSIONS,
    TEXTS,
    all_sessions,
    groups_of,
    open_decoder,
    turns_of,
)
from sf_core.reports.view import RunView
from sf_core.settings import did_you_mean
from storage import files
from storage.json_files import parse_json
from storage.manifests import Manifest
from storage.run_directory import RunDirectory
from storage.tables.metrics import Kind, read_metrics

_COUNTS = [("sessions", pa.int64()), ("failed", pa.int64()), ("seconds", pa.float64())]

ITERATIONS = pa.schema(
    [("iteration", pa.int32()), ("published", pa.bool_())]
    + [("reward", pa.float64()), ("held_out", pa.float64()), *_COUNTS, ("sampled_tokens", pa.int64())]
)

EVALUATIONS = pa.schema([("version", pa.int32()), ("reward", pa.float64()), *_COUNTS])


class Run:
    """Reads a run as tables. `open_run` returns a `Run`. Each table is a `pyarrow.Table`. The method
    `to_pandas` of a table returns a data frame.

    Each call reads the files of the run again. If the run is still training, a call returns the data that is
    committed so far. Reading does not change the run, and works while the run is stopped. Each method raises
    ValueError if a file of the run is missing or damaged."""

    def __init__(self, uri: str) -> None:
        self._run = RunView.open(uri).run

    def __repr__(self) -> str:
        return f"open_run({self.uri!r})"

    @property
    def run_id(self) -> str:
        """The name of the run, which is the last part of `uri`."""
        return self._run.run_id

    @property
    def uri(self) -> str:
        """The address of the run directory: an absolute path or a URL."""
        return self._run.uri

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run, defaults included, nested as in the YAML file."""
        uri = self._run.path("config.json")
        return parse_json(dict[str, Any], files.read_bytes(uri), f"{uri}: cannot be read")

    def iterations(self) -> pa.Table:
        """Read the iterations in order. The table has one row per iteration whose sessions are committed.

        | column | type | meaning |
        |---|---|---|
        | `iteration` | int32 | number of the iteration, from 0 |
        | `published` | bool | true if the iteration is complete and its weights are published |
        | `reward` | double | mean reward of the training sessions |
        | `held_out` | double | mean held-out reward of the new policy version; null if not measured |
        | `sessions` | int64 | number of training sessions |
        | `failed` | int64 | number of failed sessions among them |
        | `seconds` | double | wall-clock time since the previous iteration ended; null if not `published` |
        | `sampled_tokens` | int64 | tokens that the policy sampled in these sessions |

        The other columns are the metrics of training, each as double, for example `loss`, `kl`, `entropy` and
        `lag_mean`. If an iteration has several optimizer steps, the value is the mean over the steps. A
        column whose name ends in `_max` contains the maximum over the steps.
        """
        view = RunView(self._run)
        sampled = [iteration for iteration in view.iterations if "rollout" in iteration.stages]
        rows = []
        for iteration in sampled:
            row = _session_figures(iteration.stages["rollout"])
            row["iteration"] = iteration.number
            # an iteration makes the next version
            row["held_out"] = view.held_out.get(iteration.number + 1)
            row["published"] = iteration.is_complete
            row["seconds"] = iteration.seconds if iteration.is_complete else None
            rows.append(row)
        trained = [iteration.number for iteration in sampled if "train" in iteration.stages]
        return self._with_metrics(rows, ITERATIONS, "train", trained)

    def evaluations(self) -> pa.Table:
        """Read the evaluations in order. The table has one row per evaluated policy version. Version 0 is the
        policy before training.

        | column | type | meaning |
        |---|---|---|
        | `version` | int32 | the policy version; iteration k makes version k + 1 |
        | `reward` | double | mean reward of the held-out sessions |
        | `sessions` | int64 | number of held-out sessions |
        | `failed` | int64 | number of failed sessions among them |
        | `seconds` | double | wall-clock time of the evaluation |

        The other columns are the metrics of evaluations, each as double, for example `reward_NAME` for the
        environment NAME.
        """
        view = RunView(self._run)
        rows = []
        for version in view.held_out:
            manifest = view.manifest(version, "evaluate")
            assert manifest is not None
            rows.append(_session_figures(manifest) | {"version": version})
        return self._with_metrics(rows, EVALUATIONS, "evaluation", [*view.held_out])

    def sessions(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the committed sessions: training sessions, held-out sessions, and sessions that an agent
        opened itself. The table has one row per session. A session without an answer of the policy has no
        row.

        | column | type | meaning |
        |---|---|---|
        | `iteration` | int32 | iteration that trains on the session; `held_out`, `opened`: policy version |
        | `kind` | string | `training`, `held_out` or `opened` |
        | `session_id` | string | id of the session; `run.session` takes this id |
        | `task_id`, `environment` | string | id and environment of the task |
        | `group_id` | string | id of the group; null without a group |
        | `status` | string | `finished`, or the reason of the failure |
        | `reward` | double | the reward; null if unknown |
        | `reward_parts` | `list<struct<name: string, value: double>>` | named parts of the reward |
        | `started_at` | timestamp[us, UTC] | start of the session |
        | `seconds` | double | duration of the session |
        | `branches` | int64 | number of branches; more than 1 if the agent edited its history |
        | `answers` | int64 | number of answers of the policy |
        | `tokens` | int64 | number of sampled tokens |
        | `interruptions` | int64 | number of times that an answer was interrupted and continued |
        | `min_version`, `max_version` | int32 | oldest and newest policy version that sampled a token |

        `columns` names the columns to read, in this order. Four columns can be large, and are read only if
        `columns` names them: `policy`, `messages` (the conversation as JSON), `tools` (as JSON) and `output`
        (text that a command as agent printed). The values of these four columns are from the first branch of
        the session.

        Raises ValueError if `columns` names an unknown column.
        """
        wanted = [name for name in SESSIONS.names if name not in TEXTS] if columns is None else list(columns)
        if unknown := [name for name in wanted if name not in SESSIONS.names]:
            hint = did_you_mean(unknown[0], SESSIONS.names)
            raise ValueError(f"sessions have no column {unknown[0]!r}{hint}")
        return all_sessions(RunView(self._run).iter_session_sets(), wanted)

    def groups(self) -> pa.Table:
        """Read the groups of training sessions, in the order of the batches. The table has one row per group.

        | column | type | meaning |
        |---|---|---|
        | `iteration` | int32 | iteration that used or discarded the group |
        | `group_id` | string | id of the group |
        | `task_id`, `environment` | string | id and environment of the task; null if unknown |
        | `verdict` | string | `sealed` if the group is in the batch; for a discarded group, the reason |
        | `sessions` | int64 | number of sessions with a reward |
        | `reward_mean`, `reward_min`, `reward_max` | double | rewards of these sessions; null if unknown |
        | `tokens` | int64 | number of sampled tokens of these sessions; null if unknown |

        The rewards of discarded groups are known only in runs that choose groups or tasks, for example with
        `rollout.gate`.
        """
        view = RunView(self._run)
        tables = [GROUPS.empty_table()]
        for number, manifest in enumerate(view.read_committed("rollout")):
            sessions = view.find_session_set(number, "rollout")
            tables += [groups_of(sessions)] if sessions else []
            rows = [_discarded_group(number, *rejected) for rejected in view.read_rejected(manifest)]
            tables.append(pa.Table.from_pylist(rows, schema=GROUPS))
        return pa.concat_tables(tables)

    def session(self, session_id: str) -> pa.Table:
        """Read the messages of one session in order. The table has one row per message of each branch.

        | column | type | meaning |
        |---|---|---|
        | `branch_id` | string | the branch; most sessions have one |
        | `turn` | int32 | number of the row in the branch, from 0 |
        | `repeated` | bool | true if the parent branch has the same message |
        | `text` | string | the tokens as text, special tokens included |
        | `role` | string | author of the message: `user`, `assistant`, `tool`, `system` or `prompt` |
        | `start`, `end` | int32 | range of the message's tokens in the branch: `start` <= i < `end` |
        | `finish_reason` | string | `stop` or `length`; null if not sampled |
        | `engine` | string | the engine that sampled the answer; null if not sampled |
        | `temperature`, `top_p` | float | sampling parameters; null if not sampled |
        | `top_k` | int32 | sampling parameter, 0 means no limit; null if not sampled |
        | `reward` | double | reward of this answer alone; null if the answer has none |
        | `tokens` | `list<string>` | each token as text |
        | `token_ids` | `list<int32>` | the ids, exactly as the engine received and returned them |
        | `logprobs` | `list<float>` | natural logarithm of each token's probability; null if not sampled |
        | `policy_versions` | `list<int32>` | policy version that sampled each token; null if not sampled |
        | `loss_mask` | `list<bool>` | true for each sampled token that counts in this branch |

        The rows of a branch together contain each token of the branch once. The text is decoded with the
        tokenizer of the run. If the run has no tokenizer, `text` shows the ids.

        If the kind of the session is `training`, the run trains on the tokens with a true `loss_mask`. The
        run never trains on other sessions.

        `session_id` is an id from the column `session_id` of `sessions`. Raises ValueError, with a list of
        similar ids, if no session has this id.

        ```python
        turns = run.session("quickstart.g0.0.a0").to_pandas()
        print(turns[["role", "text"]])
        tokens = turns.explode(["tokens", "token_ids", "logprobs", "policy_versions", "loss_mask"])
        ```
        """
        _, branches = RunView(self._run).find_session(session_id)
        return turns_of(branches, open_decoder(self._run, any(row.images for row in branches)))

    def _with_metrics(
        self, rows: list[dict[str, Any]], schema: pa.Schema, kind: Kind, measured: Sequence[int]
    ) -> pa.Table:
        """The rows, with the metrics of those whose number is in `measured`."""
        key = schema.names[0]
        metrics: dict[int, dict[str, float | None]] = {}
        names: dict[str, None] = {}
        for number in measured:
            uri = self._run.metrics_file(kind, number)
            if files.exists(uri):
                metrics[number] = _over_steps(read_metrics(uri))
                names |= dict.fromkeys(metrics[number])
        added = [pa.field(name, pa.float64()) for name in names if name not in schema.names]
        whole = [{**metrics.get(row[key], {}), **row} for row in rows]
        return pa.Table.from_pylist(whole, schema=pa.schema([*schema, *added]))


def open_run(uri: str | Path) -> Run:
    """Open a run to read its tables, for example in a notebook. The run may still be training.

    `uri` is the run directory: a folder such as `runs/quickstart`, or a URL such as
    `s3://bucket/runs/quickstart`. For a name without a folder, `open_run` also looks in `runs/`. Raises
    ValueError, with the names of similar runs, if the run does not exist.

    ```python
    run = open_run("runs/quickstart")
    curve = run.iterations().to_pandas()
    curve.plot(x="iteration", y=["reward", "held_out"])
    ```
    """
    uri = str(uri)
    is_name = "/" not in uri and not RunDirectory(uri).exists()
    return Run(f"runs/{uri}" if is_name else uri)


def _session_figures(manifest: Manifest) -> dict[str, Any]:
    """Figures of the sessions of a rollout or an evaluation, from its manifest."""
    start, end = stage_time(manifest)
    data = {name: manifest.data.get(name) for name in ("sessions", "sampled_tokens")}
    failed = sum(failures_of(manifest).values())
    return {"reward": manifest.data.get("reward_mean"), "failed": failed, "seconds": end - start, **data}


def _discarded_group(iteration: int, group_id: str, reason: str, outcome: dict[str, Any]) -> dict[str, Any]:
    rewards = outcome.get("rewards") or []
    return {
        "iteration": iteration,
        "group_id": group_id,
        "task_id": outcome.get("task_id") or None,
        "verdict": reason,
        "sessions": len(rewards),
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "reward_min": min(rewards, default=None),
        "reward_max": max(rewards, default=None),
        "tokens": sum(outcome["tokens"]) if outcome else None,
    }


def _over_steps(rows: list[dict[str, float]]) -> dict[str, float | None]:
    """One value of each metric for all optimiser steps: the maximum of `_max`, else the mean."""
    values_of: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            values = values_of[name]
            if value is not None:
                values.append(value)
    merged: dict[str, float | None] = {}
    for name, values in values_of.items():
        if name in ("iteration", "step"):
            continue
        if not values:
            merged[name] = None
        elif name.endswith("_max"):
            merged[name] = max(values)
        else:
            merged[name] = math.fsum(values) / len(values)
    return merged
