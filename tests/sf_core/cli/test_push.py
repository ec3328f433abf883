"""`sf push` against a server that speaks the API of the Hugging Face Hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from sf_core.reports.export.card import read_head
from storage.files import write_atomic
from storage.run_directory import RunDirectory
from tests import bench
from tests.bench import commands, hub_server


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[hub_server.Hub]:
    with hub_server.serve_hub() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
        monkeypatch.setenv("COLUMNS", "500")
        # the real Hub stores large files by Xet, whose protocol this server does not speak
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        yield served


@pytest.fixture
def finished_run(empty_run: RunDirectory, small_policy: str) -> RunDirectory:
    """A finished run with its policy folder, as `finish` of an earlier version left it: without a card."""
    bench.reports.evaluations.trained(empty_run)
    empty_run.write_summary({"iterations": 2})
    shutil.copytree(small_policy, empty_run.policy_dir)
    return empty_run


def check_refused(folder: Path, arguments: list[str], *names: str) -> str:
    return commands.check_refused(folder, arguments, *names).strip()


def test_a_policy_is_pushed_with_its_card(hub: hub_server.Hub, finished_run: RunDirectory) -> None:
    code, said = commands.sf("push", finished_run.uri, "jane/speller")
    assert code == 0, said
    [pushed] = hub.repositories["jane/speller"].commits
    assert said.endswith(f"{hub.url}/jane/speller/commit/{1:040x}")
    assert (pushed.message, pushed.revision) == ("Version 2 of the policy of run-1", "main")
    local = {path.name: path.read_bytes() for path in Path(finished_run.policy_dir).iterdir()}
    assert pushed.files == local
    assert {"README.md", "reward.png", "config.json", "model.safetensors"} <= local.keys()
    assert read_head(f"{finished_run.policy_dir}/README.md")["library_name"] == "transformers"
    assert not hub.repositories["jane/speller"].private

    # a second push is a second commit, on a branch with the user's message
    code, said = commands.sf(*f"push {finished_run.uri} jane/speller --revision next -m better".split())
    assert code == 0, said
    kept = hub.repositories["jane/speller"]
    assert [(one.message, one.revision) for one in kept.commits[1:]] == [("better", "next")]


def test_no_path_of_this_machine_is_pushed(hub: hub_server.Hub, finished_run: RunDirectory) -> None:
    file = Path(finished_run.policy_dir, "config.json")
    shape = json.loads(file.read_bytes())
    file.write_text(json.dumps(shape | {"_name_or_path": str(finished_run.uri)}), encoding="utf-8")
    assert commands.sf("push", finished_run.uri, "jane/speller", "--private")[0] == 0
    kept = hub.repositories["jane/speller"]
    assert kept.private
    assert json.loads(kept.commits[0].files["config.json"]) == shape
    assert all(str(finished_run.uri).encode() not in content for content in kept.commits[0].files.values())


def test_a_policy_that_is_to_be_private_is_not_pushed_where_it_is_public(
    hub: hub_server.Hub, finished_run: RunDirectory
) -> None:
    write_atomic(f"{finished_run.policy_dir}/README.md", b"# Mine\n")
    hub.repositories["jane/speller"] = hub_server.Repository(private=False)
    told = check_refused(
        Path(finished_run.uri), ["push", finished_run.uri, "jane/speller", "--private"], "jane/speller"
    )
    assert told == (
        "the repository jane/speller exists and is public: nothing was uploaded; leave --private out, or "
        "name another repository"
    )
    assert hub.repositories["jane/speller"].commits == []


def test_a_run_without_a_finished_policy_is_not_pushed(
    hub: hub_server.Hub, empty_run: RunDirectory, tmp_path: Path
) -> None:
    bench.runs.configure(empty_run, train={"iterations": 3})
    bench.runs.pretend(empty_run, 1, finished=False)
    command = ["push", empty_run.uri, "jane/speller"]
    assert check_refused(tmp_path, command) == (
        "run run-1 is not finished (1 of 3 iterations), so it has no trained policy yet: finish it with "
        f"`sf resume {empty_run.uri}`"
    )
    emulated = RunDirectory(str(tmp_path / "run-2"))
    bench.runs.configure(emulated, engine={"kind": "emulated"}, train={"backend": "emulated"})
    bench.runs.commit(emulated, None, "start")
    assert check_refused(tmp_path, ["push", emulated.uri, "jane/speller"]) == (
        "run run-2 has no policy, because it is emulated: push another run"
    )
    assert hub.asked == []


def test_what_is_missing_is_said(
    hub: hub_server.Hub, finished_run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomic(f"{finished_run.policy_dir}/README.md", b"# Mine\n")
    command = ["push", finished_run.uri, "jane/speller"]
    assert check_refused(tmp_path, [*command[:2], "a/b/c"]).startswith(
        "a/b/c is no name of a repository: expected OWNER/NAME ("
    )
    for status, hint in {
        401: "; the token is unknown or has expired: log in again with `hf auth login`",
        403: "; the token may not write to jane/speller: use a token with write access",
    }.items():
        hub.refuse = {"repos/create": status}
        told = check_refused(tmp_path, command, "the Hub refused jane/speller: ", str(status))
        assert told.endswith(hint)
    hub.refuse = {"/large/": 400}
    code, said = commands.sf(*command)
    assert code == 2 and said.endswith("error: the upload to jane/speller failed: Bad request")
    assert hub.repositories["jane/speller"].commits == []
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    check_refused(tmp_path, command, "the Hub cannot be reached: ")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr("huggingface_hub.utils._auth.get_token", lambda: None, raising=False)
    assert check_refused(tmp_path, command) == (
        "no token of the Hugging Face Hub is here: log in with `hf auth login`, or set HF_TOKEN to a token "
        "with write access from https://huggingface.co/settings/tokens"
    )
