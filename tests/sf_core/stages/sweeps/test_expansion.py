from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sf_core.config.validation import ConfigError
from sf_core.config.yaml_file import load_config
from sf_core.stages.sweeps.expansion import Values, expand, parse_values

PLAIN = st.text("abcXYZ019._", min_size=1, max_size=8)
QUOTED = st.text("ab, {}[]:", max_size=8).map(lambda text: f'"{text}"')
NESTED = st.lists(PLAIN, min_size=1, max_size=3).map(lambda words: f"[{', '.join(words)}]")
MAPPED = st.lists(PLAIN, min_size=1, max_size=3, unique=True).map(
    lambda words: f"{{{', '.join(f'k{word}: {word}' for word in words)}}}"
)


@settings(max_examples=40)
@given(st.lists(PLAIN | QUOTED | NESTED | MAPPED, min_size=1, max_size=5, unique=True))
def test_values_are_split_where_yaml_splits_a_list(texts: list[str]) -> None:
    parsed = parse_values(f"a.b={','.join(texts)}")
    assert parsed.key == "a.b"
    assert parsed.texts == tuple(texts)


@pytest.mark.parametrize(
    ("override", "texts"),
    [
        ("a=1e-3,3e-3", ("1e-3", "3e-3")),
        ("a= 1 , 2 ", ("1", "2")),
        ("a={x: 1, y: 2},{x: 3}", ("{x: 1, y: 2}", "{x: 3}")),
        ('a="one, two",three', ('"one, two"', "three")),
        ("a=[1,2]", ("[1,2]",)),
        ("a=1,1", ("1",)),
        ("a=", ("",)),
        # no list of YAML: one value, as the user wrote it
        ("a={x: 1", ("{x: 1",)),
        ("a=x],[y", ("x],[y",)),
    ],
)
def test_a_value_is_kept_as_it_is_written(override: str, texts: tuple[str, ...]) -> None:
    assert parse_values(override) == Values("a", texts)


@settings(max_examples=10)
@given(
    st.lists(st.integers(1, 99), min_size=1, max_size=2, unique=True),
    st.lists(st.integers(2, 99), min_size=1, max_size=2, unique=True),
    st.integers(1, 3),
)
def test_there_is_one_run_for_each_combination_and_seed(
    iterations: list[int], sizes: list[int], seeds: int
) -> None:
    options = [
        f"train.iterations={','.join(map(str, iterations))}",
        f"rollout.group_size={','.join(map(str, sizes))}",
    ]
    sweep = expand(["quickstart"], options, seeds)
    assert (
        len(sweep.runs)
        == len({run.run_id for run in sweep.runs})
        == math.prod((len(iterations), len(sizes), seeds))
    )
    found = {
        (run.config["train"]["iterations"], run.config["rollout"]["group_size"], run.config["seed"])
        for run in sweep.runs
    }
    assert found == {(i, s, n) for i in iterations for s in sizes for n in range(seeds)}
    assert all(run.config["run_id"] == run.run_id and run.config["seed"] == run.seed for run in sweep.runs)
    # every setting has its first seed before one has its second
    assert [run.seed for run in sweep.runs] == sorted(run.seed for run in sweep.runs)
    # the same command is the same sweep
    assert expand(["quickstart"], options, seeds) == sweep


def test_names_of_runs_tell_setting_and_seed() -> None:
    sweep = expand(["quickstart"], ["train.learning_rate=1e-3,3e-3", "train.iterations=2"], 2)
    assert sweep.name == "quickstart-lr"
    assert [run.run_id for run in sweep.runs] == [
        "quickstart-lr-lr1e-3-seed0",
        "quickstart-lr-lr3e-3-seed0",
        "quickstart-lr-lr1e-3-seed1",
        "quickstart-lr-lr3e-3-seed1",
    ]
    named = expand(["quickstart"], ["rollout.group_size=4,8", "train.learning_rate=1e-3,3e-3"], 1, "first")
    assert named.runs[0].run_id == "first-group_size4-lr1e-3-seed0"
    kinds = expand(["quickstart"], ["train.loss.policy={kind: clip, high: 0.3},{kind: cispo}"], 1, "k")
    assert [run.run_id for run in kinds.runs] == [
        "k-policykind_clip_high_0.3-seed0",
        "k-policykind_cispo-seed0",
    ]
    long = expand(["quickstart"], [f"environment.tasks={'a' * 30}:b,{'a' * 30}:c"], 1, "long")
    assert [run.run_id for run in long.runs] == ["long-tasks-1-seed0", "long-tasks-2-seed0"]


def test_seeds_count_from_that_of_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "my run.yaml"
    file.write_text("seed: 7\n", encoding="utf-8")
    sweep = expand([file], [], 2)
    assert [run.run_id for run in sweep.runs] == ["my_run-seeds-seed7", "my_run-seeds-seed8"]
    # the run is configured as `sf train` would configure it
    alone = load_config(file, ["seed=8", "run_id=my_run-seeds-seed8"])
    assert sweep.runs[1].config == alone.model_dump(mode="json")


def test_a_setting_that_is_refused_has_no_runs_and_the_others_have() -> None:
    sweep = expand(["quickstart"], ["engine.kind=torch,tpu"], 2)
    good, bad = sweep.settings
    assert (good.label, good.fault) == ("engine.kind=torch", None)
    assert bad.fault is not None and bad.fault.startswith("--set engine.kind: ") and "'tpu'" in bad.fault
    assert {run.setting for run in sweep.runs} == {"engine.kind=torch"}


def test_what_cannot_run_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--set train\.learning_rat: .*learning_rate"):
        expand(["quickstart"], ["train.learning_rat=1,2"], 2)
