"""Whatever form a right repair has, it earns its reward; whatever form a patch has, hidden tests stay."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from fnmatch import translate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sf_core.agents.sandbox import Sandbox
from sf_core.environments.repositories import workspace
from sf_core.environments.repositories.scoring import STEERING, _put_back
from sf_core.environments.repositories.workspace import ATTEMPTS, cut, fits
from tests.bench import repositories, sandboxes
from tests.bench.properties import examples


@pytest.fixture
def needs_patch() -> None:
    """Skip a test where GNU patch is not installed; in CI it fails."""
    if shutil.which("patch") is None:
        if os.environ.get("CI") == "true":
            raise FileNotFoundError("patch is not installed; .ci/run installs Debian's")
        pytest.skip("patch is not installed; Debian's package patch has it")


def without_header(patch: str) -> str:
    return "".join(line for line in patch.splitlines(keepends=True) if not line.startswith(("diff", "index")))


HIDDEN = "--- a/lists/tests/test_lists.py\n+++ b/lists/tests/test_lists.py\n@@ -1 +1 @@\n-gone\n+other\n"

FORMS: dict[str, Callable[[str], str]] = {
    "as git writes it": lambda patch: patch,
    "without its last newline": lambda patch: patch.removesuffix("\n"),
    "without its last newline after an added line": lambda patch: (patch + NEW.format("lists/new.py"))[:-1],
    "without git's header": without_header,
    "with dates": lambda patch: re.sub(
        r"^((?:---|\+\+\+) .*)$", r"\1\t2026-11-26 10:00:00", without_header(patch), flags=re.MULTILINE
    ),
    "after words": lambda patch: f"Here is the repair:\n\n```diff\n{patch}```\n",
    "at another line": lambda patch: re.sub(r"@@ -\d+,(\d+) \+\d+,", r"@@ -90,\1 +90,", patch),
    "with another context": lambda patch: re.sub(r"^ (\S.*)$", r" \1 # so", patch, flags=re.MULTILINE),
    "with parts of hidden tests that do not fit": lambda patch: HIDDEN + patch + HIDDEN,
    "with such parts, and without its last newline": lambda patch: (HIDDEN + patch).removesuffix("\n"),
}


@pytest.mark.usefixtures("needs_patch")
@pytest.mark.parametrize("form", FORMS)
async def test_a_right_repair_earns_its_reward_in_every_form(
    make_repositories: repositories.MakeRepositories, row: dict[str, Any], form: str
) -> None:
    assert await repositories.score(make_repositories(reward="all"), row, FORMS[form](row["patch"])) == 1


@pytest.mark.usefixtures("needs_patch")
async def test_what_one_attempt_has_changed_is_not_there_in_the_next(
    make_repositories: repositories.MakeRepositories, row: dict[str, Any]
) -> None:
    # git apply --reject changes what the first part does, and patch would take that for a reversed one
    half = "--- a/lists/lists.py\n+++ b/lists/lists.py\n@@ -1,2 +1,3 @@\n def chunks(items, size):\n"
    assert (
        await repositories.score(
            make_repositories(reward="all"), row, f"{row['patch']}{half}+    # seen\n     another\n"
        )
        == 1
    )


async def test_without_the_program_patch_the_other_attempts_count_and_it_is_said_once(
    make_repositories: repositories.MakeRepositories,
    row: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    attempts = tuple(attempt.replace("patch ", "patch-of-others ") for attempt in ATTEMPTS)
    monkeypatch.setattr(workspace, "ATTEMPTS", attempts)
    workspace._tell_missing.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert (
                await repositories.score(
                    make_repositories(), row, FORMS["with another context"](row["patch"])
                )
                == 0
            )
        assert await repositories.score(make_repositories(reward="all"), row, row["patch"]) == 1
    told = [record.message for record in caplog.records if "patch-of-others" in record.message]
    assert len(told) == 1 and told[0].startswith("`patch-of-others` is missing in the sandbox")


BASE = {
    "code.py": b"one = 1\n",
    "conftest.py": b"right = 1\n",
    "tests/test_a.py": b"import code\n\n\ndef test_a():\n    pass\n",
    "tests/data.bin": bytes(range(40)),
}
THEIRS = re.compile(
    "|".join(map(translate, ["tests/*", *STEERING, *(f"*/{pattern}" for pattern in STEERING)]))
)

NEW = "diff --git a/{0} b/{0}\nnew file mode 100644\n--- /dev/null\n+++ b/{0}\n@@ -0,0 +1 @@\n+bad = 1\n"
EDIT = "--- {0}\n+++ {1}\n@@ -1 +1 @@\n-right = 1\n+bad = 1\n"
LINK = (
    "diff --git a/{0} b/{0}\nnew file mode 120000\n--- /dev/null\n+++ b/{0}\n@@ -0,0 +1 @@\n+{1}\n"
    "\\ No newline at end of file\n"
)
GONE = "".join(
    f"diff --git a/{name} b/{name}\ndeleted file mode 100644\n--- a/{name}\n+++ /dev/null\n"
    f"@@ -1,{len(lines)} +0,0 @@\n{''.join(f'-{line}' for line in lines)}"
    for name in ("tests/test_a.py", "conftest.py")
    for lines in [BASE[name].decode().splitlines(keepends=True)]
)
RENAME = "diff --git a/{0} b/{1}\nsimilarity index 100%\nrename from {0}\nrename to {1}\n"
COPY = RENAME.replace("rename", "copy")

CHEATS = {
    "edit": EDIT.format("a/conftest.py", "b/conftest.py"),
    "edit with git's header": "diff --git a/conftest.py b/conftest.py\n"
    + EDIT.format("a/conftest.py", "b/conftest.py"),
    "no prefix": EDIT.format("conftest.py", "conftest.py"),
    "another prefix": EDIT.format("x/conftest.py", "y/conftest.py"),
    "two slashes": EDIT.format("a//conftest.py", "b//conftest.py"),
    "dot": EDIT.format("a/./conftest.py", "b/./conftest.py"),
    "dots": EDIT.format("a/tests/../conftest.py", "b/tests/../conftest.py"),
    "absolute": EDIT.format("/work/conftest.py", "/work/conftest.py"),
    "escapes": EDIT.format('"a/conftest\\056py"', '"b/conf\\164est.py"'),
    "escapes after git's header": 'diff --git "a/conftest\\056py" "b/conftest\\056py"\n'
    + EDIT.format('"a/conftest\\056py"', '"b/conftest\\056py"'),
    "date": EDIT.format("a/conftest.py\t2026-11-26 10:00", "b/conftest.py\t2026-11-26 10:00"),
    "another old name": EDIT.format("a/code.py", "b/conftest.py"),
    "another new name": EDIT.format("a/conftest.py", "b/code.py"),
    "another name in git's header": "diff --git a/code.py b/code.py\n"
    + EDIT.format("a/conftest.py", "b/conftest.py"),
    "index": f"Index: conftest.py\n{'=' * 60}\n@@ -1 +1 @@\n-right = 1\n+bad = 1\n",
    "prerequisite": "Prereq: right\n" + EDIT.format("a/conftest.py", "b/conftest.py"),
    "context diff": "*** a/conftest.py\n--- b/conftest.py\n***************\n*** 1 ****\n! right = 1\n"
    "--- 1 ----\n! bad = 1\n",
    "ed": "--- a/conftest.py\n+++ b/conftest.py\n1c\nbad = 1\n.\n",
    "new": NEW.format("tests/conftest.py"),
    "new beside": NEW.format("tests/test_b.py"),
    "new below": NEW.format("deep/er/pytest.ini"),
    "removed": GONE,
    "moved away": RENAME.format("tests/test_a.py", "other.py"),
    "moved in": RENAME.format("code.py", "tests/test_a.py"),
    "moved in by steps": NEW.format("x.py") + RENAME.format("x.py", "sitecustomize.py"),
    "copied in": COPY.format("code.py", "tests/conftest.py"),
    "copied over": COPY.format("code.py", "conftest.py"),
    "mode": "diff --git a/conftest.py b/conftest.py\nold mode 100644\nnew mode 100755\n",
    "link": LINK.format("tests/conftest.py", "../code.py"),
    "link in place": GONE + LINK.format("conftest.py", "code.py"),
    "link in place of a folder": GONE
    + "diff --git a/tests/data.bin b/tests/data.bin\ndeleted file mode 100644\n"
    + LINK.format("tests", "deep"),
    "link to a folder": LINK.format("cheat.dist-info", "deep") + NEW.format("deep/entry_points.txt"),
    "through a link": LINK.format("door", "tests") + NEW.format("door/conftest.py"),
    "through a link to a file": LINK.format("door.py", "conftest.py") + EDIT.format("a/door.py", "b/door.py"),
    "file in place of a folder": GONE + NEW.format("tests"),
    "settings of git": NEW.format(".git/config") + NEW.format(".git/HEAD"),
    "a module of git": NEW.format("deep/.git"),
    "binary": "diff --git a/tests/x.pyc b/tests/x.pyc\nnew file mode 100644\nindex 0000000..0ec5f09\n"
    "GIT binary patch\nliteral 3\nKcmZQzWMT#Y01f~L\n\nliteral 0\nHcmV?d00001\n\n",
    "case": NEW.format("CONFTEST.py") + EDIT.format("a/ConfTest.py", "b/ConfTest.py"),
}


def theirs_in(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if THEIRS.match(name)}


@pytest.mark.usefixtures("needs_patch")
@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "not cut"])
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_no_patch_changes_what_the_data_set_decides_whatever_applies_it(attempt: str, is_cut: bool) -> None:
    sandboxes.need_sandbox()

    async def tried(box: Sandbox) -> tuple[set[str], set[str]]:
        """The cheats that were seen before and after the data set's files were put back."""
        before = set()
        after = set()
        for cheat, patch in CHEATS.items():
            await box.run(["find", ".", "-mindepth", "1", "-delete"], timeout_s=60)
            await box.write(BASE)
            await fits(box, attempt, cut(patch, THEIRS) if is_cut else patch)
            if theirs_in(await box.files()) != theirs_in(BASE):
                before.add(cheat)
            await _put_back(box, BASE, THEIRS)
            links = await box.run(["find", ".", "-type", "l"], timeout_s=60)
            if links.output or theirs_in(await box.files()) != theirs_in(BASE):
                after.add(cheat)
        return before, after

    before, after = sandboxes.inside(tried)
    assert after == set()
    if is_cut:
        assert before <= {"context diff", "moved away"}, before
    else:
        # they would have had an effect
        assert {"edit", "new", "moved away", "copied in", "removed"} <= before


@pytest.mark.usefixtures("needs_patch")
@pytest.mark.parametrize("cheat", ["edit", "index", "escapes", "settings of git"])
async def test_a_patch_of_protected_files_alone_earns_what_no_change_earns(
    make_repositories: repositories.MakeRepositories, row: dict[str, Any], honest: float, cheat: str
) -> None:
    assert await repositories.score(make_repositories(), row, CHEATS[cheat]) in (0, honest)


async def test_files_that_look_like_a_repository_of_git_do_not_change_hidden_tests(
    make_repositories: repositories.MakeRepositories, row: dict[str, Any], honest: float
) -> None:
    # git would take the folder for a bare repository, and have its filter write the tests
    filters = "s/self.assertEqual.*/pass/; s/assert .*/pass/"
    bare = {
        "HEAD": "ref: refs/heads/x\n",
        "config": f'[filter "cheat"]\n\tsmudge = "sed \'{filters}\'"\n',
        "refs/x": "",
        "info/attributes": "*.py filter=cheat\n",
        "objects/x": "",
    }
    assert await repositories.score(make_repositories(), row, bare) == honest


NAMES = st.lists(
    st.text(st.sampled_from('ab .-"\\\té\N{SNOWMAN}'), min_size=1, max_size=5).filter(
        lambda name: name.strip(" .")
    ),
    min_size=1,
    max_size=2,
).map("/".join)
TEXTS = st.lists(
    st.sampled_from(["", "one", "-- a/x", "++ b/x", "@@ -1 +1 @@", "diff --git a/x b/x", "é"]), max_size=6
).map(lambda lines: "".join(f"{line}\n" for line in lines))


@settings(max_examples=examples(40))
@given(files=st.dictionaries(NAMES, st.tuples(TEXTS, TEXTS), min_size=1, max_size=5), data=st.data())
def test_a_cut_takes_the_parts_of_protected_files_and_no_others(
    files: dict[str, tuple[str, str]], data: st.DataObject
) -> None:
    folders = {name.partition("/")[0] for name in files if "/" in name}
    files = {name: texts for name, texts in files.items() if name not in folders}
    chosen = data.draw(st.sets(st.sampled_from(sorted(files)))) if files else set()
    protected = re.compile("|".join(f"{re.escape(name)}\\Z" for name in chosen) or r"(?!)")
    with tempfile.TemporaryDirectory() as folder:

        def git(*words: str) -> str:
            told = subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True)
            return told.stdout.decode()

        def put(which: int) -> None:
            for name, texts in files.items():
                Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
                Path(folder, name).write_text(texts[which], encoding="utf-8")

        git("init", "-q")
        put(0)
        git("add", "-A", "-f")
        put(1)
        diff = ["diff", "--no-renames", "--"]
        left = [f":(literal){name}" for name in files if name not in chosen]
        expected = git(*diff, *left) if left else ""
        assert cut(git(*diff, "."), protected) == expected
