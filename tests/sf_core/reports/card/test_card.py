"""The model card of a trained policy."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st

from sf_core.config import RunConfig
from sf_core.process.environment_variables import ROOT
from sf_core.reports.export.card import (
    CARD,
    CHART,
    LEFT_OUT,
    Base,
    find_base,
    is_ours,
    public_settings,
    public_value,
    read_head,
    render_card,
    sign,
    write_card,
)
from sf_core.reports.view import RunView
from storage.files import write_atomic
from storage.run_directory import RunDirectory
from tests.bench.properties import examples
from tests.bench.reports import evaluations

OF_THE_BASE = "---\nlicense: other\nlicense_name: qwen-research\nlicense_link: LICENSE\n---\n# Base\n"


def card_of(run: RunDirectory) -> str:
    return Path(run.policy_dir, CARD).read_text(encoding="utf-8")


def test_a_card_tells_base_licence_evaluation_settings_and_commit(empty_run: RunDirectory) -> None:
    model = "/home/jane/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/0a1b2c"
    policy = {"model": model, "warmstart": {"demonstrations": "/home/jane/shown.jsonl"}}
    config = evaluations.trained(
        empty_run,
        policy=policy,
        seed=5,
        storage={"root": "/home/jane/runs"},
        dataplane={"url": "http://10.0.0.7:8700"},
        environment={
            "tasks": "tests.bench.stacks.echo_package:tasks",
            "settings": {"file": "~/tasks.jsonl", "api_key": "private-key", "level": 3},
        },
    )
    write_atomic(f"{empty_run.start_dir}/{CARD}", OF_THE_BASE.encode())
    assert write_card(RunView(empty_run), config)
    text = card_of(empty_run)

    head = ModelCard.load(Path(empty_run.policy_dir, CARD)).data
    assert (head.base_model, head.license, head.license_name) == ("Qwen/Qwen3-0.6B", "other", "qwen-research")
    assert (head.library_name, head.pipeline_tag) == ("transformers", "text-generation")
    assert head.tags == ["seamlessflow", "reinforcement-learning", "llm-agent"]

    assert "on 3 held-out tasks of `tests.bench.stacks.echo_package:tasks`, with one answer each" in text
    assert "| before (version 0) | 0.500 | " in text and "| after (version 2) | 0.750 | " in text
    assert "| difference | +0.250 | -0.250 to +1.000 | |" in text
    assert "Tasks that earned more after training: 1; less: 1; the same: 1. Solved: " in text
    assert "| version | 0 | 2 |" in text and f"![reward by iteration]({CHART})" in text
    assert Path(empty_run.policy_dir, CHART).read_bytes().startswith(b"\x89PNG")
    head_commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, encoding="utf-8"
    ).stdout.strip()
    assert head_commit in text

    assert "train.iterations: 2" in text and "seed 5" in text
    assert f'environment.settings: {{"file": "{LEFT_OUT}", "api_key": "{LEFT_OUT}", "level": 3}}' in text
    for secret in ("jane", "10.0.0.7", "private-key", "storage.root", "tasks.jsonl"):
        assert secret not in text


def test_no_licence_is_invented(empty_run: RunDirectory, tmp_path: Path) -> None:
    config = evaluations.trained(empty_run)
    write_card(RunView(empty_run), config)
    built_in = card_of(empty_run)
    assert {"license", "base_model"}.isdisjoint(read_head(f"{empty_run.policy_dir}/{CARD}"))
    assert "Who publishes this policy chooses one." in built_in

    own = config.model_copy(update={"policy": config.policy.model_copy(update={"model": str(tmp_path)})})
    unknown = render_card("run-1", own, find_base(own, str(tmp_path)), {}, None, is_multimodal=False)
    assert "license:" not in unknown and "base_model:" not in unknown and str(tmp_path) not in unknown
    assert "The files of the base name no licence, so none is named here." in unknown


@pytest.mark.parametrize("head", ["license: [mit", "- license", "license_name: mine", "license: 3", ""])
def test_a_base_whose_card_tells_no_licence_has_none(tmp_path: Path, head: str) -> None:
    (tmp_path / CARD).write_text(f"---\n{head}\n---\ntext", encoding="utf-8")
    config = RunConfig.model_validate({"policy": {"model": str(tmp_path)}})
    assert find_base(config, str(tmp_path)) == Base()


def test_a_model_that_sf_model_has_fetched_is_known() -> None:
    config = RunConfig.model_validate({"policy": {"model": "smollm2"}})
    found = find_base(config, "/nowhere")
    assert found == Base("HuggingFaceTB/SmolLM2-135M-Instruct", {"license": "apache-2.0"})


def test_a_card_that_was_edited_stays_and_another_is_renewed(empty_run: RunDirectory) -> None:
    config = evaluations.trained(empty_run)
    view = RunView(empty_run)
    assert write_card(view, config)
    first = card_of(empty_run)
    renewed = config.model_copy(update={"seed": 9})
    assert write_card(view, renewed)
    assert "seed 9" in card_of(empty_run) and card_of(empty_run) != first

    edited = card_of(empty_run).replace("# run-1", "# My policy")
    Path(empty_run.policy_dir, CARD).write_text(edited, encoding="utf-8")
    assert not write_card(view, config)
    assert card_of(empty_run) == edited

    # an earlier version has copied the card of the base
    for folder in (empty_run.start_dir, empty_run.policy_dir):
        write_atomic(f"{folder}/{CARD}", OF_THE_BASE.encode())
    assert write_card(view, config)
    assert card_of(empty_run) == first


@pytest.mark.parametrize("after", [{"other": [1.0]}, {}], ids=["other tasks", "none"])
def test_a_run_ends_well_whose_versions_cannot_be_compared(
    empty_run: RunDirectory, after: evaluations.Rewards
) -> None:
    config = evaluations.trained(empty_run, measured=(evaluations.BEFORE, after))
    assert write_card(RunView(empty_run), config)
    assert "The first and the last version have no stored answers to the same" in card_of(empty_run)


@settings(max_examples=examples(40))
@given(st.text(), st.text(min_size=1), st.integers(0))
def test_every_change_of_a_card_is_seen(text: str, added: str, place: int) -> None:
    card = sign(text)
    assert is_ours(card)
    at = place % (len(card) + 1)
    assert not is_ours(card[:at] + added + card[at:]) and not is_ours(text)


_names = st.text("abcdefghij_", min_size=1, max_size=6)
_paths = st.builds(
    lambda root, name: f"{root}{name}", st.sampled_from(["/home/x/", "~/", "./", "C:\\"]), _names
)


@given(
    st.recursive(
        _paths | st.integers() | st.booleans() | st.none(),
        lambda inner: st.lists(inner) | st.dictionaries(_names, inner),
    )
)
def test_no_path_is_public_wherever_it_stands(value: object) -> None:
    shown = json.dumps(public_value("environment.settings", value))
    assert "/" not in shown and "\\" not in shown


def test_where_a_run_was_computed_is_no_setting_of_its_policy() -> None:
    config = RunConfig.model_validate(
        {
            "run_id": "mine",
            "storage": {"root": "elsewhere"},
            "cluster": {"scheduler": "tcp://10.0.0.7:8786"},
            "track": {"wandb": "project"},
            "train": {"learning_rate": 1e-3},
        }
    )
    assert public_settings(config) == {"train.learning_rate": 1e-3}
