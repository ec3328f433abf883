"""A seal for which no file can be opened, because the process has too many open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sf_core.agents.reports import NOT_NOW
from sf_core.dataplane.chat.renderer import Renderer
from storage.tables.trajectories import read_trajectories, to_rows
from tests.bench.dataplane import planes
from tests.bench.dataplane.full_disk import no_more_files

TEXT = "the answer is 42."
REMEDY = "Raise the limit on open files (`ulimit -n`) or lower --max-connections"


def trained_tokens(plane: planes.ServedPlane, sealed: dict[str, Any]) -> list[int]:
    [file] = sealed["files"]
    rows = to_rows(read_trajectories(str(Path(plane.run_dir, "run", file["uri"]))))
    return [token for row in rows for token in row.token_ids[row.loss_mask].tolist()]


def test_a_session_is_stored_once_when_files_can_be_opened_again(
    served_plane: planes.ServedPlane, renderer: Renderer
) -> None:
    plane = served_plane
    plane.register(group_size=1, groups_per_batch=1)
    plane.connect(lambda prompt, seed: planes.say(renderer, TEXT))
    [claim] = plane.claim()
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    plane.post(f"/sessions/{claim['session_id']}/v1/chat/completions", body)
    planes.finish(plane, claim)
    where = "/runs/run/batches/0/seal"
    attempt = {"attempt": 1}
    with no_more_files():
        for _ in range(2):
            refused = plane.http.post(where, json=attempt)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            error = refused.json()["error"]
            assert error["code"] == "storage_unwritable"
            assert error["message"].startswith("the session file of trajectories 0 cannot be written: ")
            assert "Too many open files" in error["message"]
            assert error["message"].endswith(f"). {REMEDY}, then send the request again.")
    assert refused.status_code in NOT_NOW
    sealed = plane.post(where, attempt)
    assert trained_tokens(plane, sealed) == planes.say(renderer, TEXT)
    assert plane.post(where, attempt) == sealed
    stream = "/runs/run/batches/0/stream"
    with no_more_files():
        refused = plane.http.get(stream)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        # it would be reset under the next request
        assert refused.headers["connection"] == "close"
        message = refused.json()["error"]["message"]
        assert message.startswith("The data plane cannot use its disk: ")
        assert message.endswith(f"{REMEDY}, then send the request again.")
    assert plane.http.get(stream).status_code == 200
