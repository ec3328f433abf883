"""Requests that harnesses sent in one session each, with long texts and most tools cut, and a policy that
answers as it did then: docs/guides/agents/command.md says how the harnesses were run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sf_core.dataplane.chat.renderer import Renderer
from tests.bench.dataplane.planes import ServedPlane, answering

SESSIONS = sorted((Path(__file__).parents[3] / "data" / "harnesses").glob("*.json"))


@pytest.mark.parametrize("path", SESSIONS, ids=lambda path: path.stem)
def test_a_session_of_a_harness_is_one_row_beside_its_title(
    served_plane: ServedPlane, renderer: Renderer, path: Path
) -> None:
    recorded = json.loads(path.read_text(encoding="utf-8"))
    served_plane.register(context_length=32768, max_tokens=256)
    served_plane.connect(answering(renderer, *recorded["answers"]))
    at = f"/sessions/{served_plane.client.post('/sessions', {'run_id': 'run'})['session_id']}"
    refused = []
    for body in recorded["requests"]:
        response = served_plane.client.http.post(at + recorded["path"], json=body)
        if response.status_code != 200:
            refused.append(response.json()["error"]["message"].split(" is not supported")[0])
    assert refused == recorded["refused"]
    tree = served_plane.client.get(at)
    assert len(tree["turns"]) == len(recorded["answers"])
    assert list(tree["branch_reasons"]) == recorded["branch_reasons"]
    # ids of calls are those of another session: they count as the recorded ones
    *_, before, last = [request.prompt_ids for request in served_plane.asked]
    assert last[: len(before)] == before
