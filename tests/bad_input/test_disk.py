"""Runs that need more room than their disk has: refused before a start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sf_core.config.yaml_file import load_config
from sf_core.stages.preflight.checks import describe_lack_of_disk, preflight
from sf_core.stages.preflight.facts import Facts
from tests.bench.commands import sf
from tests.bench.refusals import check_sentence, snapshot

# more checkpoints than any disk holds
MANY = ("train.iterations=1000000", "train.keep_checkpoints=1000000", "train.checkpoint_every=1")


def facts_of(root: str, *more: str) -> Facts:
    return Facts(load_config("quickstart", [f"storage.root={root}", "run_id=r", *more]), writes=True)


def described(facts: Facts) -> str | None:
    assert facts.sizes is not None
    return describe_lack_of_disk(facts.config, facts.sizes)


def test_a_run_that_the_disk_cannot_hold_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PREFECT_API_URL", "SF_SCHEDULER", "SF_DATAPLANE_URL"):
        monkeypatch.delenv(name, raising=False)
    sets = [word for one in (f"storage.root={tmp_path}", "run_id=r", *MANY) for word in ("--set", one)]
    before = snapshot(tmp_path)
    code, output = sf("train", "quickstart", *sets)
    assert code == 1
    check_sentence(
        output.removeprefix("error: "),
        f"the disk of storage.root {tmp_path} has ",
        " free, but the run needs about ",
        " GB for weights and checkpoints: free space, set storage.root to a folder on another disk, or lower "
        "train.keep_checkpoints, train.keep_weights or train.iterations",
    )
    assert snapshot(tmp_path) == before
    code, output = sf("plan", "quickstart", *sets)
    assert (code, f"look at this the disk of storage.root {tmp_path} has " in output) == (0, True), output


def test_what_a_run_has_written_already_is_not_needed_again(tmp_path: Path) -> None:
    facts = facts_of(str(tmp_path), *MANY)
    needed = described(facts)
    folder = tmp_path / "r" / "checkpoints"
    folder.mkdir(parents=True)
    _write_hole(folder / "rank-0", 10**9)
    resumed = described(facts)
    assert resumed is not None and resumed != needed
    assert " GB more for weights and checkpoints" in resumed
    with pytest.raises(ValueError) as refused:
        preflight(facts)
    assert str(refused.value) == resumed
    # a file system may have a limit of 16 TB per file
    for rank in range(10):
        _write_hole(folder / f"rank-{rank}", 10**13)
    preflight(facts)


def _write_hole(file: Path, size: int) -> None:
    """A file of this size that takes no room."""
    with file.open("wb") as opened:
        os.truncate(opened.fileno(), size)


@pytest.mark.parametrize("root", ["memory://runs", "file:///nowhere/at/all"])
def test_what_cannot_be_measured_is_not_refused(root: str) -> None:
    preflight(facts_of(root, *MANY))


def test_a_run_that_computes_nothing_is_not_refused(tmp_path: Path) -> None:
    facts = facts_of(str(tmp_path), "engine.kind=emulated", *MANY)
    assert facts.sizes is None
    preflight(facts)


def test_a_run_that_fits_is_not_refused(tmp_path: Path) -> None:
    preflight(facts_of(str(tmp_path)))
