"""What a request costs the others: CPU of all threads of a data plane between two ticks of its loop."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any

import msgspec
import pytest

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.dataplane.errors import ApiError
from sf_core.dataplane.gateway.dialects.checks import has_strict_tool, refuse_unsupported_fields
from sf_core.dataplane.gateway.dialects.registry import find_dialect
from sf_core.dataplane.sessions.session import Session
from tests.bench.dataplane import planes, worst_bodies
from tests.bench.waits import wait_until

BOUND_S = 0.05
"""Most CPU between two ticks, beside the parse of the body, on a machine that needs REFERENCE_S."""

REFERENCE_S = 0.014
"""CPU of `reference_s` on the machine on which the bound was chosen."""

TRIES_S = 10.0
"""How long a try within the bound is waited for. Processes beside this one hold up the ticking thread and use
the bandwidth of the memory. What costs too much does so in every try."""


@pytest.fixture(scope="module")
def ticking(
    tmp_path_factory: pytest.TempPathFactory, model_dir: str, renderer: Renderer
) -> Iterator[planes.ServedPlane]:
    """A data plane that counts its CPU, with a run of a large window and one of a small window."""
    folder = tmp_path_factory.mktemp("ticking")
    module = "tests.bench.dataplane.ticking"
    options = ("--grace-s", "0")
    with (
        planes.running_process(folder / "port", 0, *options, module=module) as url,
        planes.attended(url, folder, model_dir) as plane,
    ):
        more: dict[str, Any] = {"max_tokens": 8, "session_timeout_s": 600.0, "follows_grammars": True}
        plane.register(context_length=2**20, **more)
        small = {"run_id": "small", "served_model": "small", "run_dir": str(folder / "small")}
        plane.register(context_length=2048, **(more | small))
        plane.connect(lambda prompt, seed: planes.say(renderer, "ok"))
        yield plane
        plane.post("/runs/small/release")


def count(plane: planes.ServedPlane, path: str, body: bytes) -> tuple[float, int]:
    """CPU in seconds between two ticks at most, and the status of the answer."""
    plane.http.get("/ticks")
    response = plane.http.post(path, content=body)
    return plane.http.get("/ticks").json()[0], response.status_code


def parse_s(body: bytes) -> float:
    """CPU in seconds of the parse of a body alone."""
    began = time.process_time()
    try:
        msgspec.json.decode(body)
    except ValueError:
        json.loads(body)
    return time.process_time() - began


def reference_s() -> float:
    """CPU in seconds of some arithmetic: slower machines need more for everything."""
    began = time.process_time()
    total = 0
    for number in range(400_000):
        total += number % 7
    return time.process_time() - began


def bound_s(body: bytes) -> float:
    """BOUND_S and the parse of a body, both at the present speed of this machine."""
    slowness = max(1.0, min(reference_s() for _ in range(3)) / REFERENCE_S)
    return BOUND_S * slowness + min(parse_s(body) for _ in range(2))


def check(plane: planes.ServedPlane, case: worst_bodies.Worst) -> None:
    check_body(plane, str(case), case.path, case.body())


def check_body(plane: planes.ServedPlane, case: str, path: str, body: bytes) -> None:
    def try_it() -> bool:
        # the bound is measured beside each try, because the load of the machine may change between them
        bound = bound_s(body)
        used_s, status = count(plane, path, body)
        print(f"{1000 * used_s:5.0f} ms of {1000 * bound:3.0f} ms, status {status}: {case}")
        assert status < 500, (case, status)
        return used_s <= bound

    wait_until(try_it, f"a try of {case} within its bound", quiet_s=TRIES_S)


def test_every_field_that_a_dialect_reads_has_its_worst_bodies() -> None:
    for path, bodies in worst_bodies.WHOLE.items():
        dialect = find_dialect(path)
        seen = set[str]()
        known = set[str]()
        assert dialect is not None
        done = dialect.done_fields | dialect.schema_fields
        for body in bodies:
            known |= {worst_bodies.name_of(place) for place in worst_bodies.places(body)}
            read = worst_bodies.spy(dialect.read(body, path), (), seen)
            with nullcontext() if "item_reference" not in str(body) else suppress(ApiError):
                dialect.parse(refuse_unsupported_fields(read, (), done), Session("s"))
            has_strict_tool(read)
            dialect.reply(read, "s.0.0", Session("s"))
        print(path, sorted(seen - known))
        assert seen <= known


@pytest.mark.nightly
@pytest.mark.parametrize(("path", "variant", "place"), worst_bodies.PLACES, ids=str)
def test_the_worst_body_of_a_field_does_not_stop_the_others(
    ticking: planes.ServedPlane, path: str, variant: int, place: worst_bodies.Place
) -> None:
    for case in worst_bodies.worst(path, variant, place):
        check(ticking, case)


REPRESENTATIVE = [
    worst_bodies.Worst(worst_bodies.CHAT, 0, ("messages", 1, "content", 0, "text"), "text"),
    worst_bodies.Worst(worst_bodies.CHAT, 0, ("messages", 1, "content", 0, "text"), "fitting"),
    worst_bodies.Worst(worst_bodies.CHAT, 0, ("messages",), "many"),
    worst_bodies.Worst(worst_bodies.CHAT, 0, ("messages", 2, "tool_calls"), "many"),
    worst_bodies.Worst(worst_bodies.CHAT, 0, ("stop",), "strings"),
    worst_bodies.Worst(worst_bodies.CHAT, 0, ("tools", 0, "function", "parameters"), "names"),
    worst_bodies.Worst(worst_bodies.CHAT, 1, ("tool_choice", "allowed_tools", "tools"), "many"),
    worst_bodies.Worst(worst_bodies.COMPLETIONS, 1, ("prompt", 0), "numbers"),
    worst_bodies.Worst(worst_bodies.RESPONSES, 0, ("input",), "many"),
    worst_bodies.Worst(worst_bodies.RESPONSES, 0, ("metadata",), "names"),
    worst_bodies.Worst(worst_bodies.MESSAGES, 0, ("messages", 2, "content"), "many"),
    worst_bodies.Worst(worst_bodies.GOOGLE, 0, ("contents", 2, "parts"), "many"),
]


@pytest.mark.parametrize("case", REPRESENTATIVE, ids=str)
def test_worst_bodies_do_not_stop_the_others(ticking: planes.ServedPlane, case: worst_bodies.Worst) -> None:
    check(ticking, case)


def made(field: str, value: Any, path: str = worst_bodies.CHAT, **more: Any) -> bytes:
    body = worst_bodies.WHOLE[path][0] | {"stream": False} | more
    return json.dumps(body | {field: value}).encode()


def with_arguments(values: list[int]) -> dict[str, Any]:
    return {**worst_bodies.CALL, "function": {"name": "calc", "arguments": json.dumps({"a": values})}}


def named(number: int, description: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": f"f{number}", "description": description, "parameters": {}},
    }


CALLED = [worst_bodies.HI, {"role": "assistant", "content": "", "tool_calls": [worst_bodies.CALL]}]
MANY_CALLS = [{**worst_bodies.CALL, "id": f"c{i}"} for i in range(9000)]
TEXT = worst_bodies.LINE * (worst_bodies.NUM_BYTES // (len(worst_bodies.LINE) + 1))
SPECIAL: dict[str, tuple[str, bytes]] = {
    # of which the tokenizer has a long token, so that only the encoding tells how many tokens it has
    "blanks": (
        worst_bodies.CHAT,
        made("messages", [{"role": "user", "content": " " * worst_bodies.NUM_BYTES}]),
    ),
    "a text for a small window": (
        worst_bodies.CHAT,
        made("messages", [{"role": "user", "content": TEXT}], model="small"),
    ),
    "results of a call": (worst_bodies.CHAT, made("messages", [*CALLED, *[worst_bodies.RESULT] * 20_000])),
    "calls with results": (
        worst_bodies.CHAT,
        made(
            "messages",
            [worst_bodies.HI, {"role": "assistant", "tool_calls": MANY_CALLS}]
            + [{**worst_bodies.RESULT, "tool_call_id": call["id"]} for call in MANY_CALLS],
        ),
    ),
    "arguments of a call": (
        worst_bodies.CHAT,
        made(
            "messages",
            [
                worst_bodies.HI,
                {"role": "assistant", "tool_calls": [with_arguments([0] * 1_500_000)]},
                worst_bodies.RESULT,
            ],
        ),
    ),
    "tools of different names": (
        worst_bodies.CHAT,
        made("tools", [named(i, "d" * 1000) for i in range(1024)]),
    ),
    "samples": (worst_bodies.CHAT, made("n", 128)),
    "texts behind a call": (
        worst_bodies.RESPONSES,
        made(
            "input",
            [{"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"}]
            + [{"role": "assistant", "content": "x" * 200}] * 20_000
            + [{"type": "function_call_output", "call_id": "c", "output": "4"}],
            worst_bodies.RESPONSES,
        ),
    ),
    "references": (
        worst_bodies.RESPONSES,
        made("input", [{"type": "item_reference", "id": "msg_x.0.0.1"}] * 30_000, worst_bodies.RESPONSES),
    ),
    "texts to count": (
        worst_bodies.COUNTS[worst_bodies.MESSAGES],
        made("messages", [{"role": "user", "content": TEXT[: 2**21]}], worst_bodies.MESSAGES),
    ),
    "ids": (worst_bodies.COMPLETIONS, made("prompt", [7] * 2_700_000, worst_bodies.COMPLETIONS)),
    "ids that fit": (worst_bodies.COMPLETIONS, made("prompt", [7] * 1_000_000, worst_bodies.COMPLETIONS)),
    "billing headers": (
        worst_bodies.CHAT,
        made(
            "messages",
            [{"role": "system", "content": "x-anthropic-billing-header:\n" * 290_000}, worst_bodies.HI],
        ),
    ),
}


NAMES = {f"{i:07}": 1.5 for i in range(120_000)}
TASKS: dict[str, Any] = {f"{i:07}": {} for i in range(30_000)}
CONTROL: dict[str, tuple[str, Any]] = {
    "metadata of a session": ("/sessions", {"run_id": "run", "metadata": NAMES}),
    "long metadata": ("/sessions", {"run_id": "run", "metadata": {"a": TEXT}}),
    "metadata of a group": ("/runs/run/groups", {"metadata": NAMES}),
    "sessions of a runner": ("/runs/run/claim", {"runner": "b", "max": 0, "running": [*NAMES]}),
    "tasks of a runner": (
        "/runs/run/claim",
        {"runner": "b", "max": 0, "tasks": TASKS},
    ),
    "reports": (
        "/runs/run/finished",
        {"sessions": [{"session_id": name, "status": "finished", "reward": 1} for name in TASKS]},
    ),
    "parts of a reward": ("/sessions/SESSION/reward", {"reward": 1, "reward_parts": NAMES}),
    "rewards of answers": ("/sessions/SESSION/reward", {"reward": 1, "step_rewards": NAMES}),
}


@pytest.mark.system
@pytest.mark.parametrize("name", CONTROL)
def test_the_bodies_of_control_routes_do_not_stop_agents(ticking: planes.ServedPlane, name: str) -> None:
    path, body = CONTROL[name]
    session = ticking.post("/sessions", {"run_id": "run"})["session_id"]
    check_body(ticking, name, path.replace("SESSION", session), json.dumps(body).encode())


@pytest.mark.system
@pytest.mark.parametrize("name", SPECIAL)
def test_what_only_one_dialect_can_be_sent_does_not_stop_the_others(
    ticking: planes.ServedPlane, name: str
) -> None:
    check_body(ticking, name, *SPECIAL[name])


def rss(plane: planes.ServedPlane) -> float:
    """Memory of the data plane's process in MB."""
    return float(plane.http.get("/ticks").json()[1]) / 2**20


def test_what_a_refused_request_takes_is_given_back(ticking: planes.ServedPlane) -> None:
    [claim] = ticking.claim()
    path = f"/sessions/{claim['session_id']}{worst_bodies.CHAT}"
    small = made("messages", [worst_bodies.HI], n=1)
    assert ticking.http.post(path, content=small).status_code == 200
    ticking.get("/runs/run")
    before = rss(ticking)
    for number in range(8):
        text = f"{number} {TEXT[: worst_bodies.NUM_BYTES // 2]}{' ' * (worst_bodies.NUM_BYTES // 4)}"
        body = made("messages", [worst_bodies.HI, {"role": "user", "content": text}])
        assert ticking.http.post(path, content=body).status_code == 400
    # eight of them hold 90 MB, and each took as much
    wait_until(lambda: rss(ticking) < before + 40)


def test_a_request_that_waits_holds_nothing_of_its_unknown_fields(ticking: planes.ServedPlane) -> None:
    body = made("surprise", " " * (worst_bodies.NUM_BYTES - 1000), n=1)
    ticking.post("/runs/run/pause")
    ticking.http.get("/ticks")
    before = rss(ticking)
    with ThreadPoolExecutor(24) as agents:
        asked = [agents.submit(ticking.http.post, worst_bodies.CHAT, content=body) for _ in range(24)]
        wait_until(lambda: ticking.get("/runs/run")["requests_waiting"] == len(asked))
        # they would hold 180 MB
        wait_until(lambda: rss(ticking) < before + 90)
        ticking.post("/runs/run/resume")
        assert {each.result().status_code for each in asked} == {200}
