"""A command without a sandbox that tries to reward itself, with all that its environment gives it."""

from __future__ import annotations

import json
import sys
from typing import Any

from sf_core.agents.command import CommandAgent
from sf_core.config.programs import Command
from sf_core.dataplane.chat.renderer import Renderer
from tests.bench import runners
from tests.bench.command_agents import rows_of
from tests.bench.dataplane import planes

FORGE = """
import json, os, sys, urllib.error, urllib.request
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
plane, _, rest = base.partition("/sessions/")
own = rest.partition("/")[0]

def send(method, path, body=None, with_key=True):
    headers = {"content-type": "application/json"}
    if with_key:
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(plane + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code

ask = {"model": "policy", "messages": [{"role": "user", "content": "6 * 7?"}]}
assert send("POST", f"/sessions/{own}/v1/chat/completions", ask) == 200
rival = own[:-4] + ("1" if own[-4] == "0" else "0") + own[-3:]
won = {"status": "finished", "reward": 1000000}
statuses = {}
for with_key in (True, False):
    for whose, session in (("own", own), ("rival", rival)):
        for path, body in [
            ("", None),
            ("/reward", {"reward": 1000000}),
            ("/finish", won),
            ("/finish", {"status": "failed", "cause": "group"}),
            ("/finish", {**won, "task_id": "another"}),
        ]:
            method = "GET" if body is None else "POST"
            told = f"/sessions/{session}{path}"
            statuses[f"{with_key} {whose} {told} {body}"] = send(method, told, body, with_key)
    statuses[f"{with_key} rival turn"] = send("POST", f"/sessions/{rival}/v1/chat/completions", ask, with_key)
    many = {"sessions": [{"session_id": own, **won}]}
    statuses[f"{with_key} many"] = send("POST", "/runs/run/finished", many, with_key)
    for path in ("/runs/run/claim", "/runs/run/release", "/runs"):
        statuses[f"{with_key} {path}"] = send("POST", path, {}, with_key)
    statuses[f"{with_key} status"] = send("GET", "/runs/run", None, with_key)
statuses["own turns"] = send("POST", f"/sessions/{own}/v1/chat/completions", ask)
print(json.dumps(statuses))
"""


def test_a_command_cannot_reward_itself_nor_touch_its_rivals(
    plane_process: planes.ServedPlane, renderer: Renderer
) -> None:
    plane_process.register(group_size=2, groups_per_batch=1, num_batches=1)
    plane_process.connect(lambda prompt, seed: planes.say(renderer, "42"))
    answers: list[dict[str, int]] = []

    def reward(task: Any, answer: str) -> float:
        answers.append(json.loads(answer))
        return 0.0

    agent = CommandAgent(Command(command=(sys.executable, "-c", FORGE))).run
    runners.run_until_ready(
        plane_process, runners.make_runner(plane_process.url, agent=agent, reward=reward, concurrency=2)
    )
    assert len(answers) == 2
    for statuses in answers:
        assert statuses.pop("own turns") == 200
        # its rival may have ended by itself
        assert {status for told, status in statuses.items() if "rival" not in told} == {401}, statuses
        assert set(statuses.values()) <= {401, 404}, statuses
    rows = rows_of(plane_process)
    assert len({row.session_id for row in rows}) == 2
    assert {(row.status, row.reward) for row in rows} == {("finished", 0.0)}
