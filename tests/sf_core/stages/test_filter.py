"""Exact values of the training signal: from answers of known length and given rewards to the advantage of
every token."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import OpenAI

from sf_core.dataplane.chat.renderer import Renderer
from sf_core.stages.filter import filter, lag_histogram
from sf_core.stages.rollout import rollout
from sf_core.stages.run import OpenRun, RunRef
from sf_core.training.stored_steps import read_stored_batch
from storage.media import ImageSpan, media_file, store_image
from storage.run_directory import RunDirectory
from storage.tables.batches import read_batch, select_training_rows
from storage.tables.parquet import numpy_rows
from storage.tables.schema import Trajectory
from storage.tables.trajectories import images_of
from tests.bench import runs
from tests.bench.dataplane import planes
from tests.bench.refusals import check_sentence

ITERATION = 1

RULES: dict[str, Any] = {
    "iteration": ITERATION,
    "groups_per_batch": 3,
    "group_size": 3,
    # names of groups of one and of two digits sort otherwise than their numbers
    "done_groups": list(range(9)),
    "top_p": 1.0,
    "follows_grammars": True,
}


@dataclass
class Sampled:
    """A run whose engine samples as many tokens as the test says; requests come one by one."""

    plane: planes.ServedPlane
    directory: RunDirectory
    ref: RunRef
    lengths: list[int] = field(default_factory=list)

    def ask(self, claim: dict[str, Any], messages: list[Any], length: int) -> Any:
        """Ask for `length` sampled tokens, end of turn included; returns the conversation with the answer."""
        self.lengths.append(length)
        base = f"{self.plane.url}/sessions/{claim['session_id']}/v1"
        with OpenAI(base_url=base, api_key=claim["key"], max_retries=0) as agent:
            answer = agent.chat.completions.create(model="policy", messages=messages)
        return [*messages, {"role": "assistant", "content": answer.choices[0].message.content}]

    def fail(self, claim: dict[str, Any]) -> None:
        self.plane.post(f"/sessions/{claim['session_id']}/finish", {"status": "failed", "error": "x"})

    def finish(self, claim: dict[str, Any], reward: float) -> None:
        report = {"status": "finished", "reward": reward, "task_id": "t", "environment": "test"}
        self.plane.post(f"/sessions/{claim['session_id']}/finish", report)

    def batch(self, **settings: Any) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
        """Seal and filter. Returns each row's session and advantages of trained tokens, and the filter's
        data. Checks what holds for any row."""
        runs.configure(self.directory, train={"iterations": 5, **settings})
        rollout(self.ref, ITERATION)
        found = filter(self.ref, ITERATION)
        manifest = self.directory.read_manifest(ITERATION, "filter")
        assert manifest is not None
        [file] = manifest.outputs
        table = read_batch(self.directory.path(file.uri))
        assert all((weights == 1).all() for weights in numpy_rows(table["weights"]))
        assert table["decision"].to_pylist() == ["train"] * len(table)
        rows = []
        for session, mask, advantages in zip(
            table["session_id"].to_pylist(),
            numpy_rows(table["loss_mask"]),
            numpy_rows(table["advantages"]),
            strict=True,
        ):
            assert not advantages[~mask].any(), "what was not sampled, or trains elsewhere, has none"
            rows.append((session.removeprefix("run."), advantages[mask].tolist()))
        return rows, found


@pytest.fixture
def sampled(tmp_path: Path, model_dir: str, renderer: Renderer) -> Iterator[Sampled]:
    with planes.running_app(grace_s=0.1) as url, planes.attended(url, tmp_path, model_dir) as plane:
        directory = RunDirectory(str(tmp_path / "run"))
        runs.configure(directory)
        run = Sampled(plane, directory, RunRef("run", directory.uri, url, attempt=1))
        plane.register(**RULES)
        plane.connect(lambda prompt, seed: planes.say(renderer, "x" * (run.lengths.pop(0) - 1)))
        yield run


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def fill(run: Sampled) -> None:
    """Fill a batch with groups 9, 11 and 12; 10 is rejected, because one of its sessions fails twice."""
    claims = run.plane.claim(9)
    nine = claims[:3]
    ten = claims[3:6]
    eleven = claims[6:]
    # with version 0, of lag 1 in this iteration
    begun = run.ask(nine[0], [user("a")], 3)
    run.ask(nine[1], [user("a")], 4)
    running = [claim["session_id"] for claim in claims]
    run.fail(ten[0])
    [again] = run.plane.claim(1, running=running)
    run.fail(again)
    twelve = run.plane.claim(3, running=running)
    run.plane.post("/runs/run/weights", {"version": 1, "uri": "w1"})
    run.ask(nine[0], [*begun, user("b")], 2)
    run.ask(nine[2], [user("a")], 5)
    for claim in eleven:
        run.ask(claim, [user("a")], 2)
    run.ask(twelve[0], [user("a")], 3)
    # two branches: the first turn is shared, and trained in the first of them
    begun = run.ask(twelve[1], [user("a")], 2)
    run.ask(twelve[1], [*begun, user("b")], 3)
    run.ask(twelve[1], [*begun, user("c")], 4)
    run.ask(twelve[2], [user("a")], 6)
    for claim, reward in zip([*nine, *eleven, *twelve], [1, 0, 0, 0.5, 0.5, 0.5, 2, 6, 4], strict=True):
        run.finish(claim, reward)


def test_what_came_of_groups_is_no_trajectory(sampled: Sampled) -> None:
    sampled.plane.register(**RULES, least_sessions=3)
    fill(sampled)
    sampled.batch()
    made, filtered = (sampled.directory.read_manifest(ITERATION, stage) for stage in ("rollout", "filter"))
    assert made is not None and filtered is not None
    assert len(made.files("outcomes")) == 1
    assert [*filtered.inputs] == [ref.uri for ref in made.files("trajectories")]


@pytest.mark.parametrize(
    ("scale", "of_nine", "of_twelve"),
    [
        # rewards 1, 0, 0: mean 1/3, deviation sqrt(1/3); 2, 6, 4: mean 4, deviation 2
        ("group", (2 / sqrt(3), -1 / sqrt(3)), 1.0),
        ("none", (2 / 3, -1 / 3), 2.0),
    ],
)
def test_every_trained_token_gets_the_advantage_of_its_session_within_its_group(
    sampled: Sampled, scale: str, of_nine: tuple[float, float], of_twelve: float
) -> None:
    fill(sampled)
    rows, found = sampled.batch(advantage={"kind": "group", "scale": scale})
    best, others = of_nine
    expected = [
        ("g9.0.a0", [best] * 5),
        ("g9.1.a0", [others] * 4),
        ("g9.2.a0", [others] * 5),
        ("g11.0.a0", [0.0] * 2),
        ("g11.1.a0", [0.0] * 2),
        ("g11.2.a0", [0.0] * 2),
        ("g12.0.a0", [-of_twelve] * 3),
        ("g12.1.a0", [of_twelve] * 5),
        ("g12.1.a0", [of_twelve] * 4),
        ("g12.2.a0", [0.0] * 6),
    ]
    assert [(session, len(values)) for session, values in rows] == [(s, len(v)) for s, v in expected]
    for (_, values), (_, numbers) in zip(rows, expected, strict=True):
        assert values == pytest.approx(numbers, abs=1e-5)
    assert found["rows"] == 10
    assert found["reward_mean"] == pytest.approx(14.5 / 9)
    # group 11, and the session in the middle of group 12
    assert found["zero_advantage_share"] == pytest.approx(4 / 9)
    # of 38 tokens version 0 sampled the first turns of two sessions
    assert found["lags"] == [31, 7]
    rollout = sampled.directory.read_manifest(ITERATION, "rollout")
    assert rollout is not None
    assert (rollout.data["groups"], [*rollout.data["rejected"]]) == ([9, 11, 12], ["10"])
    assert filter(sampled.ref, ITERATION) == found, "done again, it answers as before"


def test_a_batch_of_which_nothing_trains_is_refused_with_the_reason(sampled: Sampled) -> None:
    for claim in sampled.plane.claim(9):
        sampled.lengths.append(3)
        path = f"/sessions/{claim['session_id']}/v1/chat/completions"
        body = {"model": "policy", "messages": [user("a")], "response_format": {"type": "json_object"}}
        sampled.plane.post(path, body, claim["key"])
        sampled.finish(claim, 1.0)
    with pytest.raises(
        ValueError, match="no token of iteration 1 can be trained on, because every answer followed a schema"
    ):
        sampled.batch()


def test_what_needs_scores_is_left_to_the_train_step(sampled: Sampled) -> None:
    fill(sampled)
    runs.configure(sampled.directory, train={"iterations": 5, "weights": [{"kind": "surprising"}]})
    rollout(sampled.ref, ITERATION)
    assert "zero_advantage_share" not in filter(sampled.ref, ITERATION)
    manifest = sampled.directory.read_manifest(ITERATION, "filter")
    assert manifest is not None
    table = read_batch(sampled.directory.path(manifest.outputs[0].uri))
    assert table["advantages"].null_count == table["weights"].null_count == len(table) == 10


def filtered(run: RunDirectory, rows: Sequence[Trajectory], **settings: Any) -> tuple[pa.Table, Any]:
    """What the filter makes of these rows, and its data."""
    runs.configure(run, rollout={"group_size": 100}, train={"iterations": 5, **settings})
    runs.sample(run, ITERATION, list(rows))
    found = filter(RunRef(run.run_id, run.uri, "", attempt=1), ITERATION)
    manifest = run.read_manifest(ITERATION, "filter")
    assert manifest is not None
    return read_batch(run.path(manifest.outputs[0].uri)), found


def answered(group: int, place: int, reward: float, version: int = 0, **changes: Any) -> Trajectory:
    """A session of two answers."""
    said = [{"role": role, "content": "x"} for role in ("user", "assistant", "assistant")]
    versions = np.array([-1, version, version], np.int32)
    names = {"group_id": f"g{group}", "session_id": f"g{group}.{place}", "branch_id": f"g{group}.{place}.b0"}
    return runs.conversation(said, reward=reward, policy_versions=versions, **names | changes)


def test_a_session_of_which_an_image_is_lost_does_not_train_and_is_named(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run"))
    whole, broken = (store_image(run.media_dir, name) for name in (b"whole", b"broken"))
    Path(media_file(run.media_dir, broken)).write_bytes(b"other")
    spans = [ImageSpan(sha256, 0, 1, 28, 28) for sha256 in (whole, broken, "0" * 64)]
    rows = [answered(0, place, place % 2, images=(span,)) for place, span in enumerate(spans)]
    rows += [answered(0, 3, 1.0), answered(0, 1, 1.0, branch_id="1")]
    batch, found = filtered(run, rows)
    assert batch["decision"].to_pylist() == ["train", "lost_picture", "lost_picture", "train", "lost_picture"]
    assert [advantages.any() for advantages in numpy_rows(batch["advantages"])] == [1, 0, 0, 1, 0]
    assert found["lost_pictures"] == {
        "g0.1": f"{media_file(run.media_dir, broken)} does not have the SHA-256 in its name",
        "g0.2": f"{media_file(run.media_dir, '0' * 64)} is missing, but a trajectory contains this image",
    }
    assert images_of(batch)[:4] == [*((span,) for span in spans), ()]


def test_a_batch_of_which_all_images_are_lost_is_refused(tmp_path: Path) -> None:
    span = ImageSpan("0" * 64, 0, 1, 28, 28)
    rows = [answered(0, place, place, images=(span,)) for place in range(2)]
    with pytest.raises(
        ValueError, match=r"no session of iteration 1 can be trained on: .*0\.png is missing, but a"
    ):
        filtered(RunDirectory(str(tmp_path / "run")), rows)


ADVANTAGES = [
    {"kind": "group"},
    {"kind": "group", "scale": "batch"},
    {"kind": "leave_one_out"},
    {"kind": "relative"},
    {"kind": "two_level"},
    {"kind": "tree"},
]
sizes_and_rewards = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2), st.integers(0, 1)), min_size=1, max_size=9),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=25)
@given(groups=sizes_and_rewards, keep=st.sampled_from([2, 4, 6]), advantage=st.sampled_from(ADVANTAGES))
def test_what_is_kept_is_taught_as_a_batch_of_it_alone_would_be(
    groups: list[list[tuple[int, int, int]]], keep: int, advantage: dict[str, Any]
) -> None:
    rows = [
        answered(group, place, reward / 3, version, branch_id=f"g{group}.{place}.b{branch}")
        for group, sessions in enumerate(groups)
        for place, (reward, branches, version) in enumerate(sessions)
        for branch in range(branches)
    ]
    made = {"advantage": advantage, "weights": ["overlong"]}
    with TemporaryDirectory() as folder:
        all_of_it = RunDirectory(f"{folder}/all")
        one = RunDirectory(f"{folder}/alone")
        batch, found = filtered(all_of_it, rows, select={"kind": "extremes", "keep": keep}, **made)
        decisions = batch["decision"].to_pylist()
        alone, expected = filtered(
            one, [row for row, why in zip(rows, decisions, strict=True) if why == "train"], **made
        )
    assert batch["session_id"].to_pylist() == [row.session_id for row in rows], "all rows are there"
    kept = select_training_rows(batch)
    left_out = batch.filter(pc.not_equal(batch["decision"], "train"))
    assert set(left_out["decision"].to_pylist()) <= {"not_extreme"}
    for column in ("session_id", "advantages", "weights", "decision"):
        assert kept[column].to_pylist() == alone[column].to_pylist()
    sizes = [min(keep, len(sessions)) for sessions in groups]
    assert len(set(kept["session_id"].to_pylist())) == sum(sizes)
    for column in ("advantages", "weights"):
        assert not any(value for row in left_out[column].to_pylist() for value in row)
    assert (found["lags"], found["zero_advantage_share"]) == (
        expected["lags"],
        expected["zero_advantage_share"],
    )
    # of all that was sampled
    assert found["rows"] == len(rows)
    assert found["reward_mean"] == pytest.approx(np.mean([s[0] / 3 for group in groups for s in group]))


def test_what_is_selected_is_decided_before_the_train_step_that_makes_the_advantages(tmp_path: Path) -> None:
    rows = [answered(0, place, reward) for place, reward in enumerate([0.0, 1.0, 0.5, 0.25])]
    select = {"kind": "extremes", "keep": 2}
    batch, found = filtered(RunDirectory(str(tmp_path / "run")), rows, select=select, weights=["surprising"])
    assert batch["decision"].to_pylist() == ["train", "train", "not_extreme", "not_extreme"]
    assert batch["advantages"].null_count == batch["weights"].null_count == 4
    assert "zero_advantage_share" not in found


def test_a_batch_of_which_nothing_that_is_selected_trains_is_refused(tmp_path: Path) -> None:
    extremes = [answered(0, place, 2.0 * place, loss_mask=np.zeros(3, np.bool_)) for place in (0, 1)]
    rows = [extremes[0], answered(0, 2, 1.0), extremes[1]]
    with pytest.raises(
        ValueError, match="no token of iteration 1 can be trained on, because every answer followed a schema"
    ):
        filtered(RunDirectory(str(tmp_path / "run")), rows, select={"kind": "extremes", "keep": 2})


def test_the_lags_are_those_of_trained_tokens() -> None:
    rows = pa.table(
        {
            "loss_mask": [[False, True, True], [False, False, True, True]],
            "policy_versions": [[None, 5, 3], [None, 1, 4, 5]],
        }
    )
    assert lag_histogram(rows, 5) == [2, 1, 1]


@pytest.fixture
def teacher() -> Iterator[tuple[dict[str, Any], list[list[int]]]]:
    """Settings of a teacher at a URL, which says of a token its id over -100; and the rows it was asked."""
    asked: list[list[int]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"data": [{"id": "large"}]})

        def do_POST(self) -> None:
            ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
            asked.append(ids)
            told = [None, *({str(token): {"logprob": token / -100}} for token in ids[1:])]
            self._answer({"choices": [{"prompt_logprobs": told}]})

        def _answer(self, body: Any) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"url": f"http://127.0.0.1:{server.server_port}", "divergence": "sampled"}, asked
        server.shutdown()


def with_ids(row: Trajectory, *ids: int) -> Trajectory:
    return replace(row, token_ids=np.array(ids, np.int32))


def test_what_a_teacher_at_a_url_says_is_stored_beside_the_batch(
    tmp_path: Path, small_policy: str, teacher: tuple[dict[str, Any], list[list[int]]]
) -> None:
    named, asked = teacher
    settings = {"teacher": named | {"tokenizer": small_policy}, "select": {"kind": "extremes", "keep": 2}}
    run = RunDirectory(str(tmp_path / "run"))
    rows = [with_ids(answered(0, place, float(place)), place, 20 + place, 5) for place in range(3)]
    # only one of its two answers is trained
    rows[0] = replace(rows[0], loss_mask=np.array([False, False, True]))
    rows[2] = replace(rows[2], loss_mask=np.array([False, True, False]))
    batch, data = filtered(run, rows, **settings)
    assert batch["advantages"].null_count == 3 and "zero_advantage_share" not in data
    assert sorted(asked) == [[0, 20, 5], [2, 22]]
    manifest = run.read_committed(ITERATION, "filter")
    assert [ref.uri.split("/")[0] for ref in manifest.outputs] == ["batches", "scores"]
    stored = read_stored_batch(OpenRun(RunRef(run.run_id, run.uri, "", attempt=1)), ITERATION)
    said = [row.tolist() for row in numpy_rows(stored["teacher_logprobs"])]
    # the middle one does not train
    assert said == [pytest.approx(values) for values in ([0, 0, -0.05], [0, 0, 0], [0, -0.22, 0])]
    assert filter(RunRef(run.run_id, run.uri, "", attempt=2), ITERATION) == data and len(asked) == 2
    Path(run.path(manifest.files("scores")[0].uri)).write_bytes(b"changed")
    with pytest.raises(
        ValueError, match=r"scores/iteration=1/scores-1.parquet: the file has 7 bytes, but filter"
    ):
        read_stored_batch(OpenRun(RunRef(run.run_id, run.uri, "", attempt=1)), ITERATION)


def test_an_id_that_would_end_the_teachers_server_is_not_sent(
    tmp_path: Path, small_policy: str, teacher: tuple[dict[str, Any], list[list[int]]]
) -> None:
    named, asked = teacher
    known = json.loads(Path(small_policy, "config.json").read_text(encoding="utf-8"))["vocab_size"]
    rows = [with_ids(answered(0, 0, 1.0), 1, 2, known - 1), with_ids(answered(0, 1, 0.0), 1, known, 2)]
    with pytest.raises(ValueError) as refused:
        filtered(RunDirectory(str(tmp_path / "run")), rows, teacher=named | {"tokenizer": small_policy})
    names = (f"token id {known} in row g0.1.b0 of session g0.1 is outside the vocabulary of the teacher at ",)
    check_sentence(str(refused.value), *names, small_policy)
    assert asked == []


def test_without_a_teacher_at_a_url_there_are_no_scores(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "run"))
    filtered(run, [answered(0, 0, 1.0), answered(0, 1, 0.0)], teacher={"weights": "start"})
    [ref] = run.read_committed(ITERATION, "filter").outputs
    assert ref.uri.startswith("batches/")
    stored = read_stored_batch(OpenRun(RunRef(run.run_id, run.uri, "", attempt=1)), ITERATION)
    assert "teacher_logprobs" not in stored.column_names
