from __future__ import annotations

import asyncio
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.repositories.libraries import LIBRARIES
from sf_core.agents.sandbox import open_sandbox
from sf_core.config.programs import SandboxLimits
from sf_core.config.run_config import EnvironmentConfig
from sf_core.environments.registry import agent_of, environment_of, prepare_of, reward_of
from sf_core.environments.repositories.environment import Repositories
from sf_core.environments.repositories.scoring import fault_of_row
from sf_core.environments.repositories.workspace import hide_originals
from sf_core.testing.environments import EnvironmentTests
from sf_core.types import Endpoint, Task
from tests.bench import repositories
from tests.bench.canned_model import CannedModel
from tests.bench.sandboxes import need_sandbox


def source_of(generated: Path, row: dict[str, Any], commit: str | None = None) -> str:
    git = ["git", f"--git-dir={generated}/repositories/acme__lists.git"]
    return subprocess.check_output(
        [*git, "show", f"{commit or row['base_commit']}:lists/lists.py"], encoding="utf-8"
    )


class TestContract(EnvironmentTests):
    num_tasks = 1

    @pytest.fixture(autouse=True)
    def _of(self, make_repositories: repositories.MakeRepositories) -> None:
        self.environment = make_repositories()


async def test_every_instance_of_the_generator_is_repaired_by_its_patch_and_by_nothing_less(
    generated: Path, make_repositories: repositories.MakeRepositories
) -> None:
    rows = repositories.rows_of(generated)
    assert {row["repo"] for row in rows} == {"acme/lists", "acme/words"}
    for row in rows:
        assert await repositories.score(make_repositories(reward="all"), row, row["patch"]) == 1
        assert 0 < await repositories.score(make_repositories(reward="share"), row, "") < 1
    assert await repositories.score(make_repositories(reward="all"), rows[0], "") == 0


def test_a_report_has_what_was_called_and_what_came_of_it_and_not_the_repair(generated: Path) -> None:
    for row in repositories.rows_of(generated):
        assert "assert" in row["problem_statement"] or "Error" in row["problem_statement"]
        added = [line[1:].strip() for line in row["patch"].splitlines() if line.startswith("+ ")]
        assert added and not any(line in row["problem_statement"] for line in added)


def test_hidden_tests_and_the_patch_are_not_among_what_the_agent_may_know(
    generated: Path, make_repositories: repositories.MakeRepositories
) -> None:
    for row in repositories.rows_of(generated):
        git = ["git", f"--git-dir={generated}/repositories/{row['repo'].replace('/', '__')}.git"]
        names = {test.partition("[")[0].rpartition("::")[2] for test in json.loads(row["FAIL_TO_PASS"])}
        at_base = subprocess.check_output(
            [*git, "grep", "-h", "def test_", row["base_commit"]], encoding="utf-8"
        )
        assert not any(f"def {name}(" in at_base for name in names)
    task = make_repositories().tasks("train", 0)
    assert set(task.metadata) == {"repo", "base_commit"}


def test_a_task_is_the_same_instance_in_a_larger_data_set(
    generated: Path, make_repositories: repositories.MakeRepositories, tmp_path: Path
) -> None:
    rows = repositories.rows_of(generated)
    larger = tmp_path / "larger.jsonl"
    others = [rows[0] | {"instance_id": f"another-{number}"} for number in range(20)]
    larger.write_text("".join(json.dumps(row) + "\n" for row in others + rows), encoding="utf-8")
    held_out = {make_repositories().tasks("holdout", index).task_id for index in range(len(rows))}
    trained = {make_repositories().tasks("train", index).task_id for index in range(len(rows))}
    larger_held_out = {
        make_repositories(dataset=str(larger)).tasks("holdout", index).task_id for index in range(30)
    }
    assert held_out <= larger_held_out and not trained & larger_held_out


CHEATS: dict[str, dict[str, str]] = {
    "tests edited": {"lists/tests/test_lists.py": "def test_middle(): pass\ndef test_gaps(): pass\n"},
    "conftest": {
        "conftest.py": "import pytest\n@pytest.hookimpl(wrapper=True)\n"
        "def pytest_runtest_makereport(item, call):\n"
        "    report = yield\n    report.outcome = 'passed'\n    return report\n"
    },
    "conftest beside the tests": {"lists/tests/conftest.py": "import os\nos._exit(0)\n"},
    "pytest.ini": {"pytest.ini": "[pytest]\naddopts = --co\n"},
    "pyproject": {"pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-p cheat'\n", "cheat.py": ""},
    "sitecustomize": {"sitecustomize.py": "import os\nos._exit(0)\n"},
    "pytest of its own": {"pytest.py": "def main(*_): print('1 passed')\n", "_pytest/__init__.py": ""},
    "plugin": {
        "cheat.dist-info/entry_points.txt": "[pytest11]\ncheat = cheat\n",
        "cheat.dist-info/METADATA": "Name: cheat\nVersion: 1\n",
        "cheat.py": "import os\nos._exit(0)\n",
    },
}


@pytest.mark.parametrize("cheat", CHEATS)
async def test_files_that_steer_tests_earn_nothing(
    make_repositories: repositories.MakeRepositories, row: dict[str, Any], cheat: str, honest: float
) -> None:
    assert await repositories.score(make_repositories(), row, CHEATS[cheat]) == honest
    assert await repositories.score(make_repositories(), row, _as_patch(CHEATS[cheat])) <= honest


def _as_patch(files: dict[str, str]) -> str:
    parts = []
    for name, text in files.items():
        lines = text.splitlines()
        parts += [f"diff --git a/{name} b/{name}", "new file mode 100644", "--- /dev/null", f"+++ b/{name}"]
        parts += [f"@@ -0,0 +1,{len(lines)} @@", *(f"+{line}" for line in lines)]
    return "\n".join([*parts, ""])


@pytest.mark.parametrize(
    "line",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "import pytest; pytest.exit('done', 0)",
        'import os; [os.write(n, b\'{"test": "x", "passed": true}\\n\') for n in (1, 2, 3, 4)]; os._exit(0)',
    ],
    ids=["exit", "sys.exit", "pytest.exit", "report"],
)
async def test_code_that_ends_the_tests_passes_none(
    generated: Path, make_repositories: repositories.MakeRepositories, row: dict[str, Any], line: str
) -> None:
    assert (
        await repositories.score(
            make_repositories(), row, {"lists/lists.py": line + "\n" + source_of(generated, row)}
        )
        == 0
    )


async def test_a_test_that_the_code_declares_as_expected_to_fail_has_not_passed(
    make_repositories: repositories.MakeRepositories, row: dict[str, Any]
) -> None:
    code = "import pytest\ndef chunks(*_): pytest.xfail('so')\ngaps = middle = chunks\n"
    assert await repositories.score(make_repositories(), row, {"lists/lists.py": code}) == 0


async def test_moving_the_tests_away_leaves_them_in_place(
    make_repositories: repositories.MakeRepositories, row: dict[str, Any], honest: float
) -> None:
    old = "lists/tests/test_lists.py"
    new = "lists/other.py"
    patch = f"diff --git a/{old} b/{new}\nsimilarity index 100%\nrename from {old}\nrename to {new}\n"
    assert await repositories.score(make_repositories(), row, patch) == honest


@pytest.mark.parametrize(
    "answer",
    [None, 7, ["x"], "no patch", {"../out": "x"}, {"/etc/x": "x"}, {"lists": "x"}, {"a\0b": "x"}, {"": "x"}],
    ids=repr,
)
async def test_an_answer_that_is_no_change_of_files_earns_no_more_than_none(
    make_repositories: repositories.MakeRepositories, row: dict[str, Any], answer: Any, honest: float
) -> None:
    assert await repositories.score(make_repositories(), row, answer) <= honest


async def test_breaking_what_worked_counts(
    make_repositories: repositories.MakeRepositories, row: dict[str, Any], generated: Path, honest: float
) -> None:
    broken = source_of(generated, row) + "\n\nclass Never:\n    pass\n\n\ndef chunks(*_):\n    return []\n"
    assert await repositories.score(make_repositories(), row, {"lists/lists.py": broken}) < honest


async def test_an_endless_loop_ends_with_the_time_limit(
    make_repositories: repositories.MakeRepositories, row: dict[str, Any]
) -> None:
    assert (
        await repositories.score(
            make_repositories(timeout_s=3), row, {"lists/lists.py": "while True: pass\n"}
        )
        == 0
    )


def bash(command: str) -> dict[str, Any]:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    return {"tool_calls": [{"id": "c", "type": "function", "function": function}]}


def task_of(environment: Repositories, row: dict[str, Any]) -> Task:
    tasks = (environment.tasks(split, index) for split in ("train", "holdout") for index in range(9))  # type: ignore[arg-type]
    return next(task for task in tasks if task.task_id == row["instance_id"])


async def change_by(environment: Repositories, task: Task, canned_model: CannedModel) -> str:
    async with environment.prepare(task) as checkout:
        return await environment.agent(task, canned_model.endpoint, checkout)


def results(canned_model: CannedModel) -> list[str]:
    return [
        message["content"] for message in canned_model.requests[-1]["messages"] if message["role"] == "tool"
    ]


async def test_an_agent_repairs_a_repository_by_shell(
    make_repositories: repositories.MakeRepositories, row: dict[str, Any], canned_model: CannedModel
) -> None:
    repair = f"cat > /tmp/p <<'END'\n{row['patch']}END\ngit apply /tmp/p && touch new.txt a.pyc && echo done"
    canned_model.answers = [bash(repair), bash("git log --oneline | wc -l; exit 3"), {"content": "repaired"}]
    task = task_of(make_repositories(), row)
    patch = await change_by(make_repositories(), task, canned_model)
    assert results(canned_model) == ["done", "1\nexit status 3"]
    assert "new.txt" in patch and ".pyc" not in patch
    assert row["problem_statement"].strip() in canned_model.requests[0]["messages"][0]["content"]
    assert json.loads(json.dumps(patch)) == patch
    assert await repositories.score(make_repositories(reward="all"), row, patch) == 1


async def test_output_of_a_command_is_bounded_and_a_long_one_is_ended(
    make_repositories: repositories.MakeRepositories, row: dict[str, Any], canned_model: CannedModel
) -> None:
    canned_model.answers = [bash("yes | head -c 200000; echo end"), bash("sleep 60"), {"content": ""}]
    short = make_repositories(timeout_s=2)
    assert await change_by(short, task_of(short, row), canned_model) == ""
    long, ended = results(canned_model)
    assert len(long) < 20_000 and "bytes left out" in long and long.endswith("end")
    assert ended == "ended after 2 s"


async def test_the_installed_original_of_a_library_is_not_seen() -> None:
    need_sandbox()
    toolz = next(library for library in LIBRARIES if library.repo == "pytoolz/toolz")
    limits = hide_originals(SandboxLimits(), toolz.files())
    async with open_sandbox(limits) as box:
        command = "import importlib.util as u; import pytest; print(u.find_spec('toolz.itertoolz'))"
        found = await box.run(["python3", "-c", command], timeout_s=60)
    assert found.output == "None\n"


async def test_lists_in_parquet_and_archives_are_read(
    generated: Path, make_repositories: repositories.MakeRepositories, tmp_path: Path, row: dict[str, Any]
) -> None:
    lists = {name: json.loads(row[name]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    others = [row | lists | {"instance_id": f"n{number}", "version": 1} for number in range(8)]
    pq.write_table(pa.Table.from_pylist(others), tmp_path / "rows.parquet")
    git = [
        "git",
        f"--git-dir={generated}/repositories/acme__lists.git",
        "archive",
        f"--prefix=lists-{row['base_commit']}/",
    ]
    packed = subprocess.check_output([*git, "--format=tar.gz", row["base_commit"]])
    (tmp_path / f"lists-{row['base_commit']}.tar.gz").write_bytes(packed)
    from_archive = make_repositories(
        dataset=(tmp_path / "rows.parquet").as_uri(), repositories=tmp_path.as_uri(), reward="all"
    )
    assert await repositories.score(from_archive, others[0], row["patch"]) == 1
    assert await repositories.score(from_archive, others[0], "") == 0


async def test_an_archive_may_have_no_outer_folder_and_links_in_it_are_left_out(
    make_repositories: repositories.MakeRepositories, tmp_path: Path, row: dict[str, Any], generated: Path
) -> None:
    git = ["git", f"--git-dir={generated}/repositories/acme__lists.git", "archive", "--format=tar"]
    archive = io.BytesIO(subprocess.check_output([*git, row["base_commit"]]))
    path = tmp_path / f"acme__lists-{row['base_commit']}.tar.gz"
    with tarfile.open(fileobj=archive) as members, tarfile.open(path, "w:gz") as packed:
        for member in members:
            packed.addfile(member, members.extractfile(member))
        link = tarfile.TarInfo("conftest.py")
        link.type = tarfile.SYMTYPE
        link.linkname = "/etc/passwd"
        packed.addfile(link)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    made = make_repositories(dataset=str(tmp_path / "rows.jsonl"), repositories=str(tmp_path))
    assert await repositories.score(made, row, row["patch"]) == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"repo": "acme/gone"},
            "has neither a git folder acme__gone or acme/gone nor an archive acme__gone-",
        ),
        ({"base_commit": "0" * 40}, f"acme__lists.git has no commit {'0' * 40}"),
        ({"FAIL_TO_PASS": '["test_middle"]'}, "row 1: FAIL_TO_PASS.0: "),
        ({"FAIL_TO_PASS": "[]"}, "row 1: FAIL_TO_PASS: "),
        ({"FAIL_TO_PASS": "[oops"}, "row 1: FAIL_TO_PASS: "),
        ({"patch": None}, "row 1: patch: "),
        ({"repo": "../../etc/x"}, "row 1: repo: "),
    ],
)
def test_what_is_wrong_with_a_data_set_is_said_with_the_first_task(
    make_repositories: repositories.MakeRepositories,
    tmp_path: Path,
    row: dict[str, Any],
    change: dict[str, Any],
    sentence: str,
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row | change) + "\n", encoding="utf-8")
    with pytest.raises(ValueError) as refusal:
        make_repositories(dataset=str(tmp_path / "rows.jsonl")).tasks("train", 0)
    assert sentence in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "rows.jsonl cannot be read: "),
        ("no json\n", "rows.jsonl cannot be read: "),
        ("\n", "rows.jsonl has no instances"),
        ("[]\n", "row 1: "),
    ],
)
def test_a_file_without_instances_is_refused(
    make_repositories: repositories.MakeRepositories, tmp_path: Path, text: str | None, sentence: str
) -> None:
    if text is not None:
        (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as refusal:
        make_repositories(dataset=str(tmp_path / "rows.jsonl")).tasks("train", 0)
    assert sentence in str(refusal.value)


def test_a_split_without_instances_is_refused(
    make_repositories: repositories.MakeRepositories, tmp_path: Path, row: dict[str, Any]
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"none of the 1 instances of .* is in the split"):
        make_repositories(dataset=str(tmp_path / "rows.jsonl")).tasks("train", 0)


UNREADABLE = "--- /dev/null\n+++ b/new.py\n@@ -0,0 +1,1 @@\n+import of_another_host\n"
UNFIT = "--- a/gone.py\n+++ b/gone.py\n@@ -1 +1 @@\n-a\n+b\n"
GONE = "lists/tests/test_lists.py::test_of_another_time"


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (lambda row: {"test_patch": row["test_patch"] * 2}, "the test_patch does not apply to base_commit"),
        (lambda row: {"patch": UNFIT}, "the patch does not apply to base_commit"),
        (
            lambda row: {"PASS_TO_PASS": [GONE, f"{GONE}[1]"]},
            f"with the patch applied, pytest finds no {GONE}, nor 1 more",
        ),
        (
            lambda row: {"FAIL_TO_PASS": ["lists/tests/gone.py::test_gone"]},
            "with the patch applied, pytest finds no lists/tests/gone.py::test_gone, nor 3 more "
            "(ERROR: file or directory not found: lists/tests/gone.py)",
        ),
        (
            lambda row: {"test_patch": row["test_patch"] + UNREADABLE, "FAIL_TO_PASS": ["new.py::test_new"]},
            "with the patch applied, pytest finds no new.py::test_new (ModuleNotFoundError: "
            "No module named 'of_another_host')",
        ),
    ],
    ids=["test_patch", "patch", "tests", "file", "import"],
)
async def test_a_row_that_can_never_be_right_is_not_the_fault_of_any_answer(
    make_repositories: repositories.MakeRepositories,
    tmp_path: Path,
    row: dict[str, Any],
    wrong: Callable[[dict[str, Any]], dict[str, Any]],
    fault: str,
) -> None:
    rows = [row, row | wrong(row) | {"instance_id": "wrong"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    made = make_repositories(dataset=str(tmp_path / "rows.jsonl"))
    sentence = f"{tmp_path}/rows.jsonl, row 2: wrong: {fault}: correct the row or leave it out; "
    for answer in ("", None, {"lists/lists.py": "import os; os._exit(0)\n"}):
        with pytest.raises(ValueError) as refusal:
            await repositories.score(made, rows[1], answer)
        assert str(refusal.value).startswith(sentence), refusal.value
    assert await repositories.score(made, row, row["patch"]) == 1


async def test_sessions_of_a_group_that_fail_together_look_at_their_row_once(
    make_repositories: repositories.MakeRepositories, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    async def look(*given: Any) -> str | None:
        looks.append(given)
        return await fault_of_row(*given)

    monkeypatch.setattr("sf_core.environments.repositories.environment.fault_of_row", look)
    made = make_repositories()
    rewards = await asyncio.gather(*(made.score(row["instance_id"], "") for _ in range(3)))
    assert len(rewards) == 3 and max(rewards) < 1
    assert len(looks) == 1


async def test_an_answer_that_the_hidden_tests_do_not_fit_is_not_the_fault_of_the_row(
    generated: Path, make_repositories: repositories.MakeRepositories, tmp_path: Path, row: dict[str, Any]
) -> None:
    # a file that the repair changes too, so agents may
    before = source_of(generated, row).splitlines(keepends=True)
    name = "lists/lists.py"
    diff = "".join(unified_diff(before, [*before, "# seen\n"], f"a/{name}", f"b/{name}", n=1))
    both = row | {"test_patch": row["test_patch"] + diff}
    (tmp_path / "rows.jsonl").write_text(json.dumps(both) + "\n", encoding="utf-8")
    made = make_repositories(dataset=str(tmp_path / "rows.jsonl"))
    assert await repositories.score(made, both, row["patch"]) == 1
    assert await repositories.score(made, both, {name: "other = 1\n"}) == 0


@pytest.mark.parametrize("place", ["acme/lists", "acme__lists"])
async def test_a_repository_may_be_a_clone(
    generated: Path,
    make_repositories: repositories.MakeRepositories,
    tmp_path: Path,
    row: dict[str, Any],
    place: str,
) -> None:
    shutil.copytree(generated / "repositories" / "acme__lists.git", tmp_path / place / ".git")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    made = make_repositories(dataset=str(tmp_path / "rows.jsonl"), repositories=str(tmp_path), reward="all")
    assert await repositories.score(made, row, row["patch"]) == 1


@pytest.mark.parametrize("is_inside", [False, True], ids=["trusted", "in a sandbox"])
async def test_a_command_as_agent_finds_the_repository_in_its_folder(
    generated: Path, row: dict[str, Any], is_inside: bool
) -> None:
    repaired = source_of(generated, row, "whole")
    script = f"test -f lists/tests/test_lists.py && cat > lists/lists.py <<'END'\n{repaired}END\n"
    config = EnvironmentConfig.model_validate(
        {
            "name": "repositories",
            "settings": {
                "dataset": str(generated / "dataset.jsonl"),
                "repositories": str(generated / "repositories"),
                "reward": "all",
                "held_out": 0.5,
            },
            "agent": {
                "command": ["sh", "-c", script],
                "answer": "folder",
                "sandbox": {} if is_inside else None,
            },
        }
    )
    environment = environment_of(config)
    assert isinstance(environment, Repositories)
    task = task_of(environment, row)
    prepare = prepare_of(config)
    endpoint = Endpoint("http://127.0.0.1:9/sessions/s/v1", "key", "policy")
    assert prepare is not None
    async with prepare(task) as files:
        ended = await agent_of(config)(task, endpoint, files)
    assert list(ended.answer) == ["lists/lists.py"]
    assert await reward_of(config)(task, ended.answer) == {"tests": 1.0}
