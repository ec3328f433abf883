"""What holds for every refusal: one clear sentence, and nothing done."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from textwrap import dedent

import pytest

MAX_LENGTH = 600
"""Most characters of a sentence; the longest one lists the allowed keys of a section."""

FOREIGN = re.compile(r"Traceback|File \"|<class |<function | object at 0x|pydantic|site-packages|datetime\.")
"""Text that only developers of the program understand."""


def check_sentence(text: str, *names: str) -> None:
    """One sentence on one line that names what is wrong: the file, key or field."""
    assert text.strip(), "nothing is said"
    assert "\n" not in text.strip(), f"more than one line: {text}"
    assert len(text) <= MAX_LENGTH, f"{len(text)} characters: {text[:200]}..."
    assert not re.search(r"[a-z][.!?] +[A-Z]", text), f"more than one sentence: {text}"
    assert not FOREIGN.search(text), f"not for people: {text}"
    missing = [name for name in names if name not in text]
    assert not missing, f"does not name {missing}: {text}"


@contextmanager
def clear_refusal(*names: str) -> Iterator[None]:
    """Checks that the block is refused in one sentence with these parts."""
    with pytest.raises((ValueError, OSError)) as refused:
        yield
    check_sentence(str(refused.value), *names)


def snapshot(folder: Path) -> dict[str, str]:
    """The contents of all files below a folder, by path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a user writes, and the whole sentence with which it is refused."""

    given: tuple[str, ...]
    """Lines of run.yaml and options `--set KEY=VALUE`, or a line of which the test makes something else."""
    sentence: str

    def check(self, folder: Path) -> None:
        """Check that a run with this run.yaml in the folder is refused before it starts, by the checks of
        `sf plan`, and that nothing is written."""
        # they take long to import
        from sf_core.cli.explain import explain_plan
        from sf_core.config.yaml_file import load_config
        from sf_core.process.import_path import import_from
        from sf_core.stages.preflight.checks import preflight
        from sf_core.stages.preflight.facts import Facts

        options = [line.removeprefix("--set ") for line in self.given if line.startswith("--set ")]
        lines = [line for line in self.given if not line.startswith("--set ")]
        (folder / "run.yaml").write_text("\n".join(lines), encoding="utf-8")
        before = snapshot(folder)
        with pytest.MonkeyPatch.context() as patch, pytest.raises((ValueError, OSError)) as refused:
            patch.chdir(folder)
            # the checks import from the folder, and later tests do not
            patch.setattr(sys, "path", [*sys.path])
            config = load_config("run.yaml", options)
            import_from([str(folder)])
            preflight(Facts(config))
            explain_plan(config)
        assert str(refused.value) == self.sentence, refused.value
        check_sentence(self.sentence)
        assert snapshot(folder) == before


def refuses(table: str) -> pytest.MarkDecorator:
    """Runs a test once for each refusal of a table, as its argument `refusal`. In the table, what the user
    writes is followed by the sentence, in lines that begin with `> `. Between configurations that are refused
    with the same sentence is a line `---`."""
    groups = groupby(dedent(table).strip().splitlines(), lambda line: line.startswith("> "))
    parts = ["\n".join(lines) for _, lines in groups]
    refusals = [
        Refusal(tuple(given.splitlines()), " ".join(told.removeprefix("> ").split("\n> ")))
        for configurations, told in zip(parts[::2], parts[1::2], strict=True)
        for given in configurations.split("\n---\n")
    ]
    return pytest.mark.parametrize("refusal", refusals, ids=lambda refusal: "; ".join(refusal.given)[:100])
