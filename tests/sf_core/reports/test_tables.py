import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sf_core.config import PolicyConfig, RunConfig
from sf_core.models.builtin import make_policy
from sf_core.models.images.processor_config import read_image_processor
from sf_core.reports.tables import inspect_run, inspect_session
from sf_core.reports.view import RunView
from storage import files
from storage.media import ImageSpan, media_file
from storage.run_directory import STAGES, RunDirectory
from storage.tables.schema import NOT_SAMPLED, TurnSpan
from storage.tables.trajectories import write_trajectories
from tests.bench.reports import tables
from tests.bench.runs import commit

SCORED = [TurnSpan("user", 0, 5), TurnSpan("assistant", 5, 6, "stop", "e-r0", 1.0, 1.0, 0, 0.25)]


@pytest.fixture
def recorded_run(runs_root: str) -> RunDirectory:
    run = RunDirectory(f"{runs_root}/run-1")
    run.write_config(RunConfig(run_id="run-1"))
    first = [
        tables.trajectory("run-1.g0.0.a1", [*tables.GIVEN, 0, 0, 0]),
        tables.trajectory("run-1.g1.0.a1", [*tables.GIVEN, 0], reward=0.0, turns=SCORED),
        # a second branch of s0: its first eight tokens are those of the other, two new ones are sampled
        tables.trajectory(
            "run-1.g0.0.a1",
            [*tables.GIVEN, 0, 0, 0, NOT_SAMPLED, 0, 0],
            branch_id="run-1.g0.0.a1.1",
            parent_branch_id="0",
            shared_prefix=8,
            loss_mask=np.array([0] * 9 + [1, 1], np.bool_),
            turns=[
                TurnSpan("user", 0, 5),
                TurnSpan("assistant", 5, 8, "stop", "e-r0", 1.0, 1.0, 0),
                TurnSpan("user", 8, 9),
                TurnSpan("assistant", 9, 11, "length", "e-t0", 1.0, 1.0, 0),
            ],
        ),
    ]
    second = [tables.trajectory("run-1.g2.0.a1", [*tables.GIVEN, 0, 1, 1, 1])]
    held_out = [tables.trajectory("run-1.e1.0.a1", [*tables.GIVEN, 1], group_id=None)]
    told = {"reward_mean": 0.5, "failures": {"timeout": 2}}
    commit(run, 0, "rollout", outputs=[write_trajectories(run, 0, first, "part")], data=told)
    for stage in ("filter", "train", "publish"):
        commit(run, 0, stage)
    commit(run, 0, "evaluate", data={"reward_mean": 0.25, "failures": {}})
    ref = write_trajectories(run, 1, held_out, "part", kind="evaluations")
    commit(run, 1, "evaluate", outputs=[ref], data={"reward_mean": 0.75, "failures": {"agent_error": 1}})
    rows = write_trajectories(run, 1, second, "part")
    commit(run, 1, "rollout", outputs=[rows], data={"reward_mean": 1.0, "failures": {}})
    return run


@pytest.fixture
def tokenizer(recorded_run: RunDirectory, tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(tables.WORDS)}, "</s>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(folder)
    files.copy_folder(str(folder), recorded_run.start_dir)


def test_figures_count_every_session_and_every_trained_token_once(recorded_run: RunDirectory) -> None:
    view = RunView(recorded_run)
    first, second = view.rollouts.values()
    assert (first.sessions, first.reward_mean, first.tokens_sampled) == (2, 0.5, 6)
    assert (second.lag_mean, second.lag_max) == (0.25, 1)
    assert [set(iteration.stages) - {"evaluate"} for iteration in view.iterations] == [
        set(STAGES),
        {"rollout"},
    ]


def test_a_run_is_a_table_of_its_iterations(recorded_run: RunDirectory) -> None:
    lines = tables.shown(inspect_run(recorded_run.uri)).splitlines()
    assert lines[0].strip() == "run run-1"
    assert [line.split() for line in lines[3:6]] == [
        ["start", "0.250"],
        ["0", "0.500", "0.750", "0.00", "0", "6", "2", "2", "R", "F", "T", "P"],
        ["1", "1.000", "0.25", "1", "4", "1", "0", "R", ".", ".", "."],
    ]
    assert "--session run-1.g2.0.a1" in lines[-1]
    assert lines[-5:-3] == ["failed sessions: timeout 2", "failed held-out sessions: agent_error 1"]
    assert "right/mixed" not in lines[1] and "--tasks" not in tables.shown(inspect_run(recorded_run.uri))


def test_a_run_that_has_just_begun_is_shown_empty(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "new"))
    run.write_config(RunConfig(run_id="new"))
    assert "run new" in tables.shown(inspect_run(run.uri))
    with pytest.raises(ValueError, match="none is committed yet"):
        inspect_session(run.uri, "run-1.g0.0.a1")


@pytest.mark.usefixtures("tokenizer")
def test_a_session_is_shown_turn_by_turn_with_sampled_tokens_marked(recorded_run: RunDirectory) -> None:
    text = tables.shown(inspect_session(recorded_run.uri, "run-1.g2.0.a1"))
    assert "session run-1.g2.0.a1, trains iteration 1" in text
    assert "reward 1 (answer 1)  1.50 s" in text
    assert "branch 0  9 tokens, 4 sampled, 4 not trained yet  versions 0-1" in text
    assert "«sampled, not trained yet»" in text
    assert "what is six times seven" in text
    assert "assistant  5-9     stop    e-r0    0-1       «calc 42 </s> thanks»" in text


def test_what_a_command_wrote_is_shown_and_steers_no_terminal(recorded_run: RunDirectory) -> None:
    wrote = "thinking [b]hard[/b]\n\n\x1b[2Jdone\r\n"
    write_trajectories(
        recorded_run,
        0,
        [tables.trajectory("run-1.open.1", [*tables.GIVEN, 0], output=wrote)],
        "part",
        "opened",
    )
    text = tables.shown(inspect_session(recorded_run.uri, "run-1.open.1"))
    _, lines = text.split("\nwhat the command wrote\n")
    assert lines.splitlines() == ["thinking [b]hard[/b]", "", "\\x1b[2Jdone"]
    assert "command" not in tables.shown(inspect_session(recorded_run.uri, "run-1.g2.0.a1"))


def test_what_turns_earned_by_themselves_is_shown(recorded_run: RunDirectory) -> None:
    text = tables.shown(inspect_session(recorded_run.uri, "run-1.g1.0.a1"))
    assert "role       tokens  finish  engine  versions  reward  text" in text
    assert "assistant  5-6     stop    e-r0    0         0.25    " in text
    assert "reward  text" not in tables.shown(inspect_session(recorded_run.uri, "run-1.g2.0.a1"))


@pytest.mark.usefixtures("tokenizer")
def test_a_branch_shows_only_what_its_parent_does_not(recorded_run: RunDirectory) -> None:
    text = tables.shown(inspect_session(recorded_run.uri, "run-1.g0.0.a1"))
    _, branch = text.split("branch 1 of 0  11 tokens, 5 sampled, 2 trained")
    assert "0-8" in branch
    assert "as in branch 0" in branch
    assert "«what is»" not in text.split("branch 1")[0]
    assert branch.split("assistant")[1].split()[1:] == ["length", "e-t0", "0", "«what", "is»"]


def test_without_a_tokenizer_ids_are_shown(recorded_run: RunDirectory) -> None:
    assert "«5 6 7 8»" in tables.shown(inspect_session(recorded_run.uri, "run-1.g2.0.a1"))


def test_held_out_sessions_are_found_too(recorded_run: RunDirectory) -> None:
    text = tables.shown(inspect_session(recorded_run.uri, "run-1.e1.0.a1"))
    assert "session run-1.e1.0.a1, evaluates version 1" in text
    assert "group none" in text


@pytest.mark.parametrize(
    ("session", "legend", "fate"),
    [
        ("run-1.g2.0.a1", "«sampled, trained»  «sampled, not trained here»", "trained"),
        (
            "run-1.e1.0.a1",
            "«sampled in an evaluation, not used for training»  «sampled, not counted here»",
            "not used for training",
        ),
        (
            "run-1.open.1",
            "«sampled in an opened session, not used for training»  «sampled, not counted here»",
            "not used for training",
        ),
    ],
)
def test_what_became_of_the_tokens_is_said(
    recorded_run: RunDirectory, session: str, legend: str, fate: str
) -> None:
    commit(recorded_run, 1, "train")
    write_trajectories(
        recorded_run, 0, [tables.trajectory("run-1.open.1", [*tables.GIVEN, 0])], "part", "opened"
    )
    text = tables.shown(inspect_session(recorded_run.uri, session))
    assert legend in text
    assert re.search(rf"(\d) sampled, \1 {fate}  versions", text)


def test_the_tools_of_a_branch_are_named(recorded_run: RunDirectory) -> None:
    tools = json.dumps([{"type": "function", "function": {"name": name}} for name in ("calc", "\x1b[2J")])
    write_trajectories(
        recorded_run,
        0,
        [tables.trajectory("run-1.open.1", [*tables.GIVEN, 0], tools=tools)],
        "part",
        "opened",
    )
    assert "tools: calc, \\x1b[2J" in tables.shown(inspect_session(recorded_run.uri, "run-1.open.1"))
    assert "tools:" not in tables.shown(inspect_session(recorded_run.uri, "run-1.e1.0.a1"))


def test_sampled_text_cannot_steer_the_terminal(recorded_run: RunDirectory) -> None:
    nasty = ["\x1b[2J", "[/red]", "\n"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(nasty)}, "\n"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    row = tables.trajectory("run-1.g9.0.a1", [0, 0, 0], turns=[TurnSpan("[/b]", 0, 3)])
    commit(recorded_run, 2, "rollout", outputs=[write_trajectories(recorded_run, 2, [row], "part")])
    if files.is_local(recorded_run.uri):
        tokenizer.save_pretrained(recorded_run.start_dir)
        text = tables.shown(inspect_session(recorded_run.uri, "run-1.g9.0.a1"))
        assert "\x1b" not in text
        assert "\\x1b[2J [/red] ↵" in text


def test_names_that_agents_chose_cannot_steer_the_terminal(recorded_run: RunDirectory) -> None:
    nasty = "\x1b]0;owned\x07"
    row = tables.trajectory(
        "run-1.open.1",
        [0, 0, 0],
        task_id=nasty,
        environment=nasty,
        group_id=nasty,
        reward_parts={nasty: 1.0},
        turns=[TurnSpan(nasty, 0, 3, "stop", nasty)],
    )
    write_trajectories(recorded_run, 0, [row], "part", "opened")
    text = tables.shown(inspect_session(recorded_run.uri, "run-1.open.1"))
    assert "\x1b" not in text
    assert text.count("\\x1b]0;owned\\x07") == 6


def test_an_unknown_session_is_named_with_sessions_like_it(recorded_run: RunDirectory) -> None:
    with pytest.raises(
        ValueError, match=r"run-1: no session 'run-1\.g2\.0\.a2'; did you mean run-1\.g2\.0\.a1"
    ):
        inspect_session(recorded_run.uri, "run-1.g2.0.a2")


def test_a_committed_file_that_is_gone_is_named(recorded_run: RunDirectory) -> None:
    files.remove(recorded_run.path("trajectories/iteration=1/part.parquet"))
    with pytest.raises(ValueError, match=r"iteration=1/part\.parquet: no such file"):
        inspect_run(recorded_run.uri)


def test_a_session_names_the_images_that_were_seen(recorded_run: RunDirectory, tmp_path: Path) -> None:
    policy = PolicyConfig(sees=True, hidden_size=32, num_layers=1)
    make_policy(str(tmp_path / "policy"), policy, seed=0)
    files.copy_folder(str(tmp_path / "policy"), recorded_run.start_dir)
    placeholder = read_image_processor(recorded_run.start_dir).token_id
    ids = np.array([5, placeholder, placeholder, placeholder, placeholder, 6], np.int32)
    images = [ImageSpan("a" * 64, 1, 4, 56, 56)]
    row = tables.trajectory("run-1.open.1", [*tables.GIVEN, 0], token_ids=ids, images=images)
    write_trajectories(recorded_run, 0, [row], "part", "opened", is_multimodal=True)
    text = tables.shown(inspect_session(recorded_run.uri, "run-1.open.1"))
    assert "what was seen" in text and "[picture]" in text and "image_pad" not in text
    assert "1-5     56 by 56" in text
    folded = re.sub(r"\s+", "", text)
    assert media_file(recorded_run.media_dir, "a" * 64) in folded
