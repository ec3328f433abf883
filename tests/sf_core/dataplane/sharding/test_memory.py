"""The hub bounds the memory of all processes together: it is told what its gateways hold."""

from __future__ import annotations

from pathlib import Path

from sf_core.dataplane.chat.renderer import Renderer
from tests.sf_core.dataplane.sharding.conftest import TWO
from tests.sf_core.dataplane.stand import attended, running_process


def test_sessions_from_outside_are_refused_while_those_in_gateways_fill_memory(
    tmp_path: Path, model_dir: str, renderer: Renderer
) -> None:
    options = (*TWO, "--memory-mb", "0.004")
    with (
        running_process(tmp_path / "port", 0, *options) as url,
        attended(url, tmp_path, model_dir) as server,
    ):
        server.register()
        opened: list[str] = []

        def is_refused() -> bool:
            answer = server.http.post("/sessions", json={"run_id": "run"})
            if answer.status_code == 200:
                opened.append(answer.json()["session_id"])
            return answer.status_code == 429

        server.wait_for(is_refused)
        for session_id in opened:
            server.post(f"/sessions/{session_id}/finish", {"status": "failed"})
        server.wait_for(lambda: not is_refused())
