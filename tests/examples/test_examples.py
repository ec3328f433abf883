"""The commands of the examples' pages, as they stand there, with fewer and smaller iterations."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import yaml

from examples.own_loss.my_loss import soft
from seamlessflow import Run, open_run
from tests.bench.learning import check_learning
from tests.bench.waits import patience

ROOT = Path(__file__).parents[2]
VENVS = ROOT / ".venvs"
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
REAL = {"policy.warmstart.steps": None, "train.tokens_per_microbatch": 1024}
"""More of them, for a pretrained model."""


def page_of(example: str) -> str:
    return (ROOT / "examples" / example / "README.md").read_text(encoding="utf-8")


def commands(example: str, language: str = "bash") -> str:
    """The blocks of the page that are run as they stand; other blocks have no language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page_of(example), re.M | re.S)
    return "".join(block for found, block in blocks if found == language)


def shortened(script: str, settings: dict[str, object] | None = None) -> str:
    """The script, each training with SMALL and these settings behind its own; None leaves one out."""
    given = SMALL | (settings or {})
    options = [
        f"--set {shlex.quote(f'{name}={value}')}" for name, value in given.items() if value is not None
    ]
    return re.sub(r"^sf train .*$", lambda line: " ".join([line[0], *options]), script, flags=re.M)


class Clone:
    """A copy of one example where the pages look for it, and the commands that it needs."""

    def __init__(self, folder: Path, example: str, cache: Path) -> None:
        self.top = folder
        self.folder = folder / "examples" / example
        shutil.copytree(ROOT / "examples" / example, self.folder, ignore=shutil.ignore_patterns("runs"))
        self.env = os.environ | {
            "PREFECT_HOME": str(folder / "prefect"),
            "SF_CACHE_DIR": os.environ.get("SF_CACHE_DIR", str(cache)),
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "200",
        }
        self.env.pop("PREFECT_API_URL", None)
        self.use(Path(sys.executable).parent)

    def use(self, commands: Path) -> None:
        """Find commands in this folder first."""
        self.env["PATH"] = os.pathsep.join([str(commands), self.env["PATH"]])

    def start(self, script: str, folder: Path | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-e", "-o", "pipefail", "-c", script],
            cwd=folder or self.top,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            encoding="utf-8",
        )

    def run(self, script: str, quiet_s: float = 600) -> str:
        """Output of a script of bash that starts at the top of the clone."""
        process = self.start(script)
        try:
            said, _ = process.communicate(timeout=patience(quiet_s))
        finally:
            stop(process)
        if "cannot be downloaded" in said:
            pytest.skip(f"the package index is not reached: {said[-1000:]}")
        assert process.returncode == 0, said[-6000:]
        return said

    def read(self, run_id: str) -> Run:
        return open_run(str(self.folder / "runs" / run_id))


def stop(process: subprocess.Popen[str]) -> None:
    """Interrupt a script that still runs, with all that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(patience(60))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def clone(tmp_path: Path, request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Clone:
    """A copy of the example that the test is named after."""
    assert pytestconfig.cache is not None
    example = request.node.originalname.removeprefix("test_")
    return Clone(tmp_path, example, pytestconfig.cache.mkdir("examples"))


def make_venv(name: str, packages: list[str], with_ours: bool = False) -> Path:
    """An environment that outlasts the tests, perhaps with all that is installed here."""
    venv = VENVS / name
    stamp = venv / ".ready"
    if not stamp.exists() or stamp.read_text(encoding="utf-8").split() != packages:
        try:
            run = {"check": True, "capture_output": True, "text": True, "timeout": patience(300)}
            subprocess.run([sys.executable, "-m", "venv", str(venv)], **run)
            if with_ours:
                [site] = venv.glob("lib/python3*/site-packages")
                ours = sysconfig.get_path("purelib")
                (site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n", encoding="utf-8")
            pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--retries=1"]
            subprocess.run([*pip, *packages], **run)
        except (subprocess.SubprocessError, OSError) as error:
            if os.environ.get("CI") == "true":
                raise
            pytest.skip(f"{packages[0]} cannot be installed into {venv}: {error}")
        stamp.write_text(" ".join(packages), encoding="utf-8")
    return venv


def without_install(script: str) -> tuple[str, list[str]]:
    """The script without the lines that make an environment, and the packages that those install."""
    [packages] = re.findall(r"^\S*pip install (.*)$", script, re.M)
    return re.sub(r"^(python -m venv|\S*pip install) .*\n", "", script, flags=re.M), packages.split()


def rewards(run: Run) -> list[float]:
    """Mean reward of each batch; all are numbers."""
    found = run.iterations()["reward"].to_pylist()
    assert found and all(math.isfinite(reward) for reward in found), found
    return [float(reward) for reward in found]


def test_each_page_is_one_screen_and_the_table_lists_it() -> None:
    table = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    folders = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders == {*EXAMPLES}
    for example in EXAMPLES:
        page = page_of(example)
        assert len(page.splitlines()) <= 60 and len(page) < 4000, example
        assert "](../../docs/" in page, f"{example} links no guide"
        assert f"]({example}/README.md)" in table, f"examples/README.md does not list {example}"
        shown = set(re.findall(r"\]\((?!\.\.|http)([^)#]+)\)", page))
        assert all((ROOT / "examples" / example / file).exists() for file in shown), shown


@pytest.mark.parametrize("name", ["service.py", "desk.py", "callers.py", "product.yaml"])
def test_the_files_of_the_product_are_those_of_its_guide(name: str) -> None:
    guide = (ROOT / "docs" / "guides" / "agents" / "product.md").read_text(encoding="utf-8")
    assert f"\n{(ROOT / 'examples' / 'product' / name).read_text(encoding='utf-8')}```\n" in guide


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


@pytest.mark.nightly
def test_own_loss(clone: Clone) -> None:
    clone.run(shortened(commands("own_loss")))
    mine = clone.read("mine")
    clipped = clone.read("clipped")
    assert mine.settings["train"]["loss"]["policy"] == {"kind": "custom", "function": "my_loss:soft"}
    assert clipped.settings["train"]["loss"]["policy"]["kind"] != "custom"
    assert len(rewards(mine)) == len(rewards(clipped)) == 2
    assert all(step["clip_fraction_low"] == 0 for step in mine.iterations().to_pylist())


@pytest.mark.nightly
def test_curriculum(clone: Clone) -> None:
    said = clone.run(shortened(commands("curriculum"), {"train.iterations": 4, "evaluate.every": 4}))
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
    policy = clone.folder / "runs" / "adapter" / "policy"
    factors = policy / "adapter" / "adapter_model.safetensors"
    assert factors.stat().st_size < (policy / "model.safetensors").stat().st_size


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("example", "run_ids"),
    [
        ("own_loss", ["mine", "clipped"]),
        ("adapter", ["adapter"]),
        ("curriculum", ["curriculum"]),
        ("teacher", ["teacher", "pupil"]),
        ("repair", ["repair"]),
    ],
)
def test_the_commands_of_the_page_train_a_policy_that_learns(
    tmp_path: Path, pytestconfig: pytest.Config, example: str, run_ids: list[str]
) -> None:
    assert pytestconfig.cache is not None
    clone = Clone(tmp_path, example, pytestconfig.cache.mkdir("examples"))
    clone.run(commands(example), 1200)
    for run_id in run_ids:
        [run] = clone.top.glob(f"**/runs/{run_id}")
        check_learning(run)


@pytest.mark.nightly
def test_teacher(clone: Clone) -> None:
    pupil = clone.folder / "pupil.yaml"
    assert yaml.safe_load(pupil.read_text(encoding="utf-8"))["train"]["teacher"]["model"] == "runs/teacher@40"
    pupil.write_text(pupil.read_text(encoding="utf-8").replace("@40", "@2"), encoding="utf-8")
    clone.run(shortened(commands("teacher"), {"policy.warmstart.steps": None}))
    run = clone.read("pupil")
    distances = run.iterations()["teacher_kl"].to_pylist()
    # two small batches are too few for the distance to fall
    assert len(rewards(run)) == len(distances) == 2 and all(0 < one < math.inf for one in distances)
    assert run.settings["train"]["advantage"] == {"kind": "none"}


@pytest.mark.nightly
def test_langgraph_agent(clone: Clone) -> None:
    script, packages = without_install(commands("langgraph_agent"))
    venv = make_venv("langgraph", packages, with_ours=True)
    words = f'#!/bin/sh\nexec {venv / "bin" / "python"} -m sf_core "$@"\n'
    (clone.top / "bin").mkdir()
    (clone.top / "bin" / "sf").write_text(words, encoding="utf-8")
    (clone.top / "bin" / "sf").chmod(0o755)
    clone.use(clone.top / "bin")
    said = clone.run(script, 1200)
    assert "What is" in said and "the agent answered: " in said
    run = clone.read("langgraph")
    check_learning(clone.folder / "runs" / "langgraph")
    sessions = run.sessions(["session_id", "status", "answers", "messages", "tools"]).to_pylist()
    assert {session["status"] for session in sessions} == {"finished"}
    called = [session for session in sessions if session["answers"] > 1]
    assert called, "no session called a tool"
    assert all("calc" in session["tools"] for session in called)
    roles = [message["role"] for message in json.loads(called[0]["messages"])]
    assert roles[:3] == ["user", "assistant", "tool"]


@pytest.mark.nightly
def test_product(clone: Clone) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    callers = clone.folder / "callers.py"
    callers.write_text(callers.read_text(encoding="utf-8").replace("9000", port), encoding="utf-8")
    service, calls = commands("product", "").replace("9000", port).splitlines()
    # the small policy: that SmolLM2 learns of stars takes minutes
    small = {"policy.model": "null", "rollout.outside_groups": 4}
    _, cd, train = shortened(commands("product"), small).splitlines()
    started = [clone.start(f"{cd}\n{train}")]
    said = ""
    try:
        assert started[0].stdout is not None
        for line in started[0].stdout:
            said += line
            if found := re.search(r"external agents find the data plane at http://127.0.0.1:(\d+)", line):
                # nobody reads what they print, and a full pipe would stop them
                started += [
                    clone.start(f"exec env {words} > {clone.top}/printed-{number} 2>&1", clone.folder)
                    for number, words in enumerate((service.replace("PORT", found[1]), calls))
                ]
        assert started[0].wait(patience(60)) == 0, said[-6000:]
    finally:
        for process in reversed(started):
            stop(process)
    run = clone.read("desk")
    assert len(rewards(run)) == 2
    trained = [one for one in run.sessions().to_pylist() if one["kind"] == "training"]
    assert len(trained) == 2 * 4 * 4
    assert {one["environment"] for one in trained} == {"desk"}
    assert all(one["task_id"].startswith("What is ") for one in trained)
    assert {one["reward"] for one in trained if one["status"] == "finished"} <= {n / 5 for n in range(6)}


@pytest.mark.nightly
def test_harness(clone: Clone) -> None:
    script, packages = without_install(commands("harness"))
    make_venv("mini-swe-agent", packages)
    (clone.top / ".venvs").symlink_to(VENVS)
    said = clone.run(shortened(script, REAL | {"rollout.group_size": 2, "rollout.groups_per_batch": 1}), 1200)
    assert "reward: " in said
    run = open_run(str(clone.top / "runs" / "harness"))
    assert len(rewards(run)) == 2
    sessions = run.sessions(["kind", "status", "tools", "messages", "output"]).to_pylist()
    assert any("bash" in (session["tools"] or "") for session in sessions)
    assert any("Please solve this issue" in (session["messages"] or "") for session in sessions)


@pytest.mark.nightly
def test_real_model(clone: Clone) -> None:
    said = clone.run(shortened(commands("real_model"), REAL), 1200)
    assert "before" in said and "Write a sentence about" in said
    run = clone.read("words")
    assert len(rewards(run)) == 2
    kinds = ["first_words", "at_most_words", "no_comma"]
    assert run.settings["environment"]["settings"]["kinds"] == kinds
    assert (clone.folder / "runs" / "words" / "report.html").exists()


@pytest.mark.nightly
def test_programs(clone: Clone) -> None:
    said = clone.run(shortened(commands("programs"), REAL | {"rollout.max_tokens": 64}), 1200)
    assert "Write a Python function solve(value)" in said
    assert len(rewards(open_run(str(clone.top / "runs" / "programs")))) == 2


@pytest.mark.nightly
def test_repair(clone: Clone) -> None:
    said = clone.run(shortened(commands("repair"), {"policy.warmstart.steps": 200}))
    assert "calls " in said
    run = open_run(str(clone.top / "runs" / "repair"))
    assert len(rewards(run)) == 2
    assert max(run.sessions()["answers"].to_pylist()) > 1


@pytest.mark.nightly
def test_repositories(clone: Clone) -> None:
    clone.run(commands("repositories"), 1200)
    rows = [
        json.loads(line)
        for line in (clone.top / "faults" / "dataset.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len(rows) > 5
    for row in rows:
        owner, name = row["repo"].split("/")
        assert (clone.top / "faults" / "repositories" / f"{owner}__{name}.git").is_dir()
