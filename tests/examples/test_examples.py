"""The commands of the examples' pages, as they stand there, with fewer and smaller iterations."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from examples.own_loss.my_loss import soft
from seamlessflow import Run, open_run
from tests.patience import patience

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(page.parent.name for page in (ROOT / "examples").glob("*/README.md"))
SMALL = {
    "policy.warmstart.steps": 40,
    "rollout.group_size": 4,
    "rollout.groups_per_batch": 4,
    "train.iterations": 2,
    "evaluate.every": 2,
    "evaluate.num_tasks": 8,
}
"""Settings of every training that a page shows."""


def commands(example: str) -> str:
    """The blocks of the page that are to be run, without those that only belong to a larger model."""
    page = (ROOT / "examples" / example / "README.md").read_text()
    return "\n".join(re.findall(r"^```bash\n(.*?)^```$", page, re.M | re.S))


def shortened(script: str, **settings: object) -> str:
    """The script, each training with these settings behind its own; `a__b` is `a.b`, and None leaves "
    "one out."""
    given = SMALL | {name.replace("__", "."): value for name, value in settings.items()}
    options = (
        " ".join(f"--set {{shlex.quote(f'{{name}}={{value}}')}}")
        for name, value in given.items()
        if value is not None
    )
    return re.sub(r"^(sf train .*?)( +#.*)?$", rf"\1 {options}", script, flags=re.M)


class Clone:
    """A copy of one example where the pages look for it, and the commands that it needs."""

    def __init__(self, folder: Path, example: str, cache: Path) -> None:
        self.folder = folder / "examples" / example
        shutil.copytree(
            ROOT / "examples" / example, self.folder, ignore=shutil.ignore_patterns("runs", "data")
        )
        self.home = folder
        self.env = os.environ | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PREFECT_HOME": str(folder / "prefect"),
            "SF_CACHE_DIR": os.environ.get("SF_CACHE_DIR", str(cache)),
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "200",
        }
        self.env.pop("PREFECT_API_URL", None)

    def run(self, script: str, quiet_s: float = 600) -> str:
        """Output of a script of bash that starts at the top of the clone. Raises AssertionError if a "
        "command fails."""
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", script],
            cwd=self.home,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=patience(quiet_s),
        )
        assert done.returncode == 0, done.stdout[-6000:]
        return done.stdout

    def read(self, run_id: str) -> Run:
        return open_run(str(self.folder / "runs" / run_id))


@pytest.fixture
def clone(tmp_path: Path, request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Clone:
    """A copy of the example of the test's name: test_NAME, or test_NAME_and_more after two underscores."""
    assert pytestconfig.cache is not None
    example = request.node.originalname.removeprefix("test_").partition("__")[0]
    return Clone(tmp_path, example, pytestconfig.cache.mkdir("examples"))


def rewards(run: Run) -> list[float]:
    """Mean reward of each batch. Raises AssertionError if one is not a number."""
    found = run.iterations()["reward"].to_pylist()
    assert found and all(math.isfinite(reward) for reward in found), found
    return found


def test_a_page_is_one_screen_and_names_its_files() -> None:
    assert {"own_loss", "curriculum"} <= set(EXAMPLES)
    table = (ROOT / "examples" / "README.md").read_text()
    for example in EXAMPLES:
        page = (ROOT / "examples" / example / "README.md").read_text()
        assert len(page.splitlines()) <= 80 and len(page) < 5000, example
        assert "../../docs/" in page, f"{example} links no guide"
        assert f"]({example}/README.md)" in table, f"examples/README.md does not list {example}"
        for file in re.findall(r"\]\((?!\.\.|http)([^)#]+)\)", page):
            assert (ROOT / "examples" / example / file).exists(), f"{example}: {file}"


def test_the_loss_of_ten_lines_begins_as_a_policy_gradient_and_fades() -> None:
    class Tokens:
        advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
        ratio = torch.tensor([1.0, 1.0, 8.0, 8.0], requires_grad=True)

    loss = soft(Tokens)
    loss.sum().backward()
    assert loss.shape == (4,) and Tokens.ratio.grad is not None
    near, far = Tokens.ratio.grad.split(2)
    assert near.tolist() == pytest.approx([-1.0, 1.0])
    assert float(far.abs().max()) < 0.01


@pytest.mark.system
def test_own_loss(clone: Clone) -> None:
    clone.run(shortened(commands("own_loss")))
    mine, clipped = clone.read("mine"), clone.read("clipped")
    assert mine.settings["train"]["loss"]["policy"] == {"kind": "custom", "function": "my_loss:soft"}
    assert clipped.settings["train"]["loss"]["policy"]["kind"] != "custom"
    assert len(rewards(mine)) == len(rewards(clipped)) == 2
    assert all(step["clip_fraction_low"] == 0 for step in mine.iterations().to_pylist())


@pytest.mark.system
def test_curriculum(clone: Clone) -> None:
    said = clone.run(shortened(commands("curriculum"), train__iterations=4, evaluate__every=4))
    run = clone.read("curriculum")
    kinds: dict[int, set[str]] = {}
    for group in run.groups().to_pylist():
        kinds.setdefault(group["iteration"], set()).add(group["environment"])
    assert [kinds[number] for number in range(3)] == [{"calculator"}] * 3
    assert "spell_backward" in kinds[3]
    assert "iteration 0: 0% words" in said
    assert len(rewards(run)) == 4


@pytest.mark.nightly
def test_adapter(clone: Clone) -> None:
    said = clone.run(shortened(commands("adapter")))
    assert "adapter_model.safetensors" in said and "adapter_config.json" in said
    run = clone.read("adapter")
    assert run.settings["train"]["lora"]["rank"] == 32
    assert len(rewards(run)) == 2
    factors = clone.folder / "runs" / "adapter" / "policy" / "adapter" / "adapter_model.safetensors"
    assert (
        factors.stat().st_size
        < (clone.folder / "runs" / "adapter" / "policy" / "model.safetensors").stat().st_size
    )


@pytest.mark.nightly
def test_teacher(clone: Clone) -> None:
    pupil = clone.folder / "pupil.yaml"
    assert yaml.safe_load(pupil.read_text())["train"]["teacher"]["model"] == "runs/teacher@40"
    pupil.write_text(pupil.read_text().replace("@40", "@6"))
    clone.run(
        shortened(
            commands("teacher"), train__iterations=6, rollout__groups_per_batch=None, rollout__group_size=None
        )
    )
    run = clone.read("pupil")
    distances = run.iterations()["teacher_kl"].to_pylist()
    assert len(rewards(run)) == 6 and distances[-1] < distances[0], distances
    assert run.settings["policy"]["hidden_size"] == 64
